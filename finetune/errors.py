"""Exceptions for user errors and failed trainings, and the format of their messages."""

import contextlib
import dataclasses
import difflib
import errno
import os
import re
import types
import typing
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import ArgsKwargs


class FinetuneError(Exception):
    """A user error, or a request that cannot be satisfied: exit status 2, no traceback.

    Contains every problem that was found, so that all of them can be fixed at once. Each problem
    states what is wrong, where, the value, and what to write instead.
    """

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(one_line(problem) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), self.problems  # keeps the problems separate when pickled


class TrainingFailure(FinetuneError):
    """Training started and could not continue: exit status 1."""

    exit_status = 1


class Interrupted(FinetuneError):
    """Training was stopped by a signal and has been saved: exit status 75 (EX_TEMPFAIL).

    A scheduler may run the same command again with `--resume auto`.
    """

    exit_status = 75


def problems_of(checks: Iterable[Callable[..., Iterable[str]]], *values: object) -> list[str]:
    """Every problem that a list of checks finds in the same values, each once, in their order."""
    return list(dict.fromkeys(each for check in checks for each in check(*values)))


def refuse(problems: Iterable[str], kind: type[FinetuneError] = FinetuneError) -> None:
    """Raise FinetuneError, or another `kind` of it, with the problems, if there are any."""
    if found := list(problems):
        raise kind(*found)


@contextlib.contextmanager
def reading(problem: str, instead: str = "") -> Generator[None]:
    """Turn any error that a library raises while it reads files, or asks the hub, into a problem.

    For a damaged file or a cut connection, libraries raise whatever their code happens to raise:
    KeyError, AttributeError, types of their own libraries, even plain Exception.

    Args:
        problem: The file, the model or the setting, and what failed.
        instead: What to do instead.

    Raises:
        FinetuneError: with the first line of the error. Out-of-memory errors are raised unchanged.
    """
    try:
        yield
    except (FinetuneError, MemoryError):
        raise
    except BaseException as error:
        first = first_line(error)
        if not is_of_library(error) or (isinstance(error, RuntimeError) and "memory" in first):
            raise  # PyTorch's error for memory is a RuntimeError
        text = f"{problem} ({first}); {instead}" if instead else f"{problem}: {first}"
        raise FinetuneError(text) from None


def is_of_library(error: BaseException) -> bool:
    """Whether an error comes from a library's code, and is not a request to exit.

    A library in Rust panics if an index in a file is wrong, with an error that is not an Exception.
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    text = repr(error) if isinstance(error, KeyError) else str(error)
    return text.strip().split("\n")[0] or type(error).__name__


def of_a_file(error: OSError) -> str | None:
    """A message such as `FILE: Permission denied`; None if the error is not about a user's file.

    Errors without a file name, or about a file of this package, are bugs; only errors about a full
    or read-only disk are reported without a file name.
    """
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{error.strerror}: a file could not be written"
    if error.strerror is None or not isinstance(error.filename, str | bytes):
        return None
    name = os.fsdecode(error.filename)
    if Path(name).is_relative_to(Path(__file__).parent):
        return None
    return f"{name if len(name) <= LONG else f'{name[:LONG]}...'}: {error.strerror}"


LONG = 400
"""Maximum number of characters of a file name in a message."""
LONGEST = 4000
"""Maximum number of characters in a problem, including quoted values."""


def one_line(problem: str) -> str:
    """A problem on one line that is safe to print, with its middle left out if it is long.

    Names, values and messages of libraries come from untrusted files: they may contain line breaks,
    unpaired surrogates, and terminal control codes.
    """
    if len(problem) > LONGEST:
        cut = LONGEST // 2
        left = f" [{len(problem) - 2 * cut:,} characters left out] "
        problem = problem[:cut] + left + problem[-cut:]
    if problem.isprintable():
        return problem
    words = " ".join(line.strip() for line in problem.splitlines() if line.strip())
    return "".join(
        each if each.isprintable() else repr(each)[1:-1] for each in words.replace("\t", " ")
    )


def one_of(names: Sequence[str]) -> str:
    """Names as a list in a sentence: `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The closest known word as `; did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


# Fields of a recipe: pydantic's errors, for recipes in Python and in files.

FURTHER = "to train an adapter further, set model.adapter=FOLDER"
ADAPTER_OF_OTHERS = re.compile(
    r"^adapter\.(start|from|path|name|dir|folder|init|load|resume|checkpoint|weights|model)"
    r"|(adapter|lora|peft)_?(name|path|dir|model|checkpoint|weights|resume|init)"
    r"|(resume|init|start|load|continue).*(adapter|lora|peft)"
)
"""Keys, some from other toolkits, with which users try to name an existing adapter."""


class Checked(type):
    """Metaclass of recipes and their sections that raises FinetuneError for invalid fields.

    Nested values are validated by pydantic directly, so each error is reported once.
    """

    if not TYPE_CHECKING:  # a type checker reads the signature of the dataclass

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise FinetuneError(*problems(error, cls, cls.__name__)) from None


def problems(error: ValidationError, kind: type | None, where: str) -> list[str]:
    """The problems of a validation, each as `where: path: what is wrong, got ..., instead`."""
    found: list[str] = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in _named(item["loc"], kind)) or "recipe"
        got: object = item["input"]
        if item["type"] == "unexpected_keyword_argument":
            known = known_fields(kind, item["loc"][:-1])
            hint = did_you_mean(str(item["loc"][-1]), known)
            listed = f"; known are {', '.join(known)}" if known and not hint else ""
            if ADAPTER_OF_OTHERS.search(place):
                hint, listed = f"; {FURTHER}", ""
            found.append(f"{where}: {place}: unknown key{hint}{listed}")
        elif item["type"] == "literal_error" and "ctx" in item:
            known = _quoted(item["ctx"]["expected"])
            hint = did_you_mean(str(got), known)
            found.append(f"{where}: {place}: got {got!r}, expected {' or '.join(known)}{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            hidden = isinstance(got, dict | list) or not item["loc"]
            if message.startswith("expected ") and not hidden:
                message, hidden = f"got {got!r}, {message}", True
            hidden = hidden or item["type"] in ("missing", "missing_argument")
            at = where if not item["loc"] and isinstance(got, ArgsKwargs) else f"{where}: {place}"
            found.append(f"{at}: {message}{'' if hidden else f', got {got!r}'}")
    return found


def _named(path: Sequence[int | str], kind: type | None) -> Sequence[int | str]:
    """The path, with a positional argument replaced by the name of its field."""
    if path and isinstance(path[0], int):
        names = known_fields(kind, ())
        if path[0] < len(names):
            return (names[path[0]], *path[1:])
    return path


def _quoted(listed: str) -> list[str]:
    """The quoted words of a pydantic message, "'a', 'b' or 'c'"."""
    return re.findall(r"'([^']*)'", listed)


def known_fields(kind: type | None, path: Sequence[int | str]) -> list[str]:
    """Names of the fields at a path of a recipe."""
    for part in path:
        if kind is None or isinstance(part, int):
            continue
        hint = typing.get_type_hints(kind).get(str(part))
        kind = next(
            (t for t in _inner_types(hint) if isinstance(t, type) and dataclasses.is_dataclass(t)),
            None,
        )
    if kind is None or not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in dataclasses.fields(kind)]


def _inner_types(hint: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is not None:
        return [inner for argument in typing.get_args(hint) for inner in _inner_types(argument)]
    return [hint]
