"""Load recipes by name or file, with overrides: defaults, then the file, then key=value."""

import ast
import contextlib
import dataclasses
import json
import os
import re
import runpy
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from finetune import extensions
from finetune.errors import (
    FURTHER,
    FinetuneError,
    did_you_mean,
    one_line,
    problems,
    reading,
    refuse,
)
from finetune.methods import METHODS, find_method
from finetune.process.yaml_text import read_yaml
from finetune.recipe import Recipe

FREE_TO_CHANGE = {
    "backend", "data_checks", "evaluation", "max_steps", "epochs", "saving", "trackers", "kernels",
    "batch.micro_rows", "batch.micro_tokens", "batch.padding_free",
    "batch.share_prompts",
    "model.activation_checkpointing", "model.attention", "model.pickle",
    "optim.on_nonfinite", "optim.max_skipped",
    "on_reward_error", "reward_timeout", "sampling_rows",
    "vllm_server_base_url", "vllm_server_timeout",
}  # fmt: skip
"""Fields that may change on resume, because they do not affect what a step computes from its rows.

`max_steps` and `epochs` move the end of the schedule and thus the learning rate of later steps.
"""


class ExactNumbers(yaml.SafeLoader):
    """YAML loader that reads 2e-4 as a number, as Python and JSON do; YAML 1.1 reads a string."""


ExactNumbers.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def folders() -> list[Path]:
    """Folders to search for recipes: that of the working directory, then the shipped ones."""
    package = Path(__file__).parent
    return [Path("recipes"), package / "recipes", package.parent / "recipes"]


def names() -> dict[str, Path]:
    """Files of the available recipes, by name."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*")):
            if path.suffix in (".py", ".yaml", ".yml", ".json") and not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return found


def describe(path: Path) -> str:
    """The first line of a recipe's docstring or leading comment, without running the recipe.

    For a file that cannot be read, the reason, so that a list still shows the others.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return one_line(f"(cannot be read: {error})")
    first = text.lstrip().split("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def resolve(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or file, with `key=value` overrides on dotted paths.

    Raises:
        FinetuneError: contains every problem of the file and the overrides.
    """
    recipe = load(find(str(name)))
    return override(recipe, overrides) if overrides else recipe


def find(name: str) -> Path:
    """The file of a recipe.

    Raises:
        FinetuneError: the recipe does not exist.
    """
    if name.endswith((".py", ".yaml", ".yml", ".json")):
        if os.path.isfile(name):
            return Path(name)
        raise FinetuneError(f"recipe {name}: no such file")
    known = names()
    if name not in known:
        raise FinetuneError(
            f"recipe '{name}': unknown{did_you_mean(name, known)}; `finetune list` shows all"
        )
    return known[name]


def load(path: Path) -> Recipe:
    """Read a recipe from a Python file (the single Recipe that it defines), YAML or JSON.

    Raises:
        FinetuneError: contains every problem of the file.
    """
    if path.suffix == ".py":
        return _from_python(path)
    with reading(f"{path}: cannot be read"):
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else read_yaml(text, ExactNumbers)
    return from_fields(fields, str(path))


def _from_python(path: Path) -> Recipe:
    try:
        defined = runpy.run_path(str(path))
    except FinetuneError as error:
        raise FinetuneError(*(f"{path}: {problem}" for problem in error.problems)) from None
    except (Exception, SystemExit) as error:  # any exception of the user's code
        lines = [line for name, line in _places(error) if name == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise FinetuneError(f"{where}: {type(error).__name__}: {error}") from None
    recipes = [value for value in defined.values() if isinstance(value, Recipe)]
    distinct = [r for i, r in enumerate(recipes) if not any(r is s for s in recipes[:i])]
    if "recipe" in defined and isinstance(defined["recipe"], Recipe):
        return defined["recipe"]
    if len(distinct) != 1:
        raise FinetuneError(f"{path}: expected one `recipe = ...`, found {len(distinct)}")
    return distinct[0]


def _places(error: BaseException) -> Iterator[tuple[str, int | None]]:
    """Files and lines that an error passed through, outermost first."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        yield frame.f_code.co_filename, line


def to_fields(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values for JSON and YAML, including its method."""
    kind = type(recipe)
    name = extensions.name_of(kind)
    built_in = METHODS.get(recipe.method) == name
    return {"method": recipe.method if built_in else name} | to_jsonable_python(recipe)


def from_fields(fields: Any, where: str = "recipe") -> Recipe:
    """Build a recipe from plain values, the inverse of `to_fields`.

    Raises:
        FinetuneError: contains every problem with its path.
    """
    if not isinstance(fields, dict):
        raise FinetuneError(f"{where}: expected keys and values, got {type(fields).__name__}")
    fields = dict(fields)
    method = fields.pop("method", None)
    if not isinstance(method, str):
        known = ", ".join(METHODS)
        raise FinetuneError(f"{where}: method: got {method!r}, expected one of {known}")
    kind = find_method(method, f"{where}: method")
    try:
        made = TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise FinetuneError(*problems(error, kind, where)) from None
    refuse(f"{where}: {flag}" for flag in _flags_as_numbers(fields, made))
    return made


def _flags_as_numbers(given: Any, made: Any, *path: str) -> Iterator[str]:
    """Problems of values that are true or false where a number is expected; pydantic reads 1."""
    if isinstance(given, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        yield f"{'.'.join(path)}: Input should be a number, got {given}"
    elif isinstance(given, dict):
        for name, value in given.items():
            inside = made.get(name) if isinstance(made, dict) else getattr(made, str(name), None)
            yield from _flags_as_numbers(value, inside, *path, str(name))
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        for number, (value, inside) in enumerate(zip(given, made, strict=False)):
            yield from _flags_as_numbers(value, inside, *path, str(number))


def override(recipe: Recipe, pairs: Sequence[str]) -> Recipe:
    """Apply `key=value` overrides on dotted paths (`optim.lr=1e-4`, `data.0.first=100`).

    Raises:
        FinetuneError: a pair does not have this form, or the result is not a valid recipe.
    """
    return with_words(to_fields(recipe), pairs)


def with_words(fields: dict[str, Any], pairs: Sequence[str]) -> Recipe:
    """A recipe from plain values, which may lack what the pairs of `override` give.

    Raises:
        FinetuneError: as `override`.
    """
    kind = find_method(fields["method"])
    wrong = [problem for pair in pairs if (problem := assign(fields, kind, pair))]
    try:
        changed = from_fields(fields, "override")
    except FinetuneError as error:
        raise FinetuneError(*wrong, *error.problems) from None
    refuse(wrong)
    return changed


def assign(fields: dict[str, Any], kind: type, pair: str) -> str | None:
    """Set the value of a `key=value` in plain values of a type; returns the problem, or None."""
    path, equals, text = pair.partition("=")
    if not equals or not path:
        is_adapter = os.path.isfile(f"{pair}/adapter_config.json")
        return f"'{pair}': expected key=value{f'; {FURTHER}' if is_adapter else ''}"
    parts, hint = path.split("."), kind
    place: Any = fields
    for number, part in enumerate(parts):
        if isinstance(place, dict) and isinstance(scalar := _value_of_dict(hint), tuple):
            parts, part, hint = parts[: number + 1], ".".join(parts[number:]), scalar[0]
        else:
            hint = _hint_within(hint, part)
        last = number == len(parts) - 1
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                break
            if last:
                place[int(part)] = _value(text, hint)
                return None
            place = place[int(part)]
        elif isinstance(place, dict):
            if last:
                place[part] = _value(text, hint)
                return None
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        else:
            break
    return f"{path}: there is no such place in the recipe"


def _hint_within(hint: Any, part: str) -> Any:
    """The type of a field, an element or a value within a type; Any if unknown."""
    if hint is Any:
        return Any
    for kind in alternatives(hint):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if part not in {field.name for field in dataclasses.fields(kind)}:
                return Any
            return typing.get_type_hints(kind, include_extras=True)[part]
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and part.isdigit():
            return (
                arguments[0]
                if arguments[1:] == (...,)
                else (dict(enumerate(arguments)).get(int(part), Any))
            )
        if typing.get_origin(kind) is dict:
            return arguments[1]
    return Any


def _value_of_dict(hint: Any) -> tuple[Any] | None:
    """The type of the values of a dictionary whose values are not nested; None for other types.

    The keys of such a dictionary are module names, which contain dots.
    """
    for kind in alternatives(hint):
        if typing.get_origin(kind) is dict and typing.get_args(kind)[1] is not Any:
            return (typing.get_args(kind)[1],)
    return None


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, without annotations."""
    if typing.get_origin(hint) is Annotated:
        return alternatives(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for member in typing.get_args(hint) for kind in alternatives(member)]
    return [hint]


def _value(text: str, hint: Any) -> Any:
    """Parse a value from the command line: the first interpretation that the field accepts.

    If the field accepts none, the first interpretation is returned, for the error message.
    """
    adapter = TypeAdapter(hint, config=None if _is_section(hint) else _LENIENT)
    for each in _readings(text, hint):
        with contextlib.suppress(ValidationError):
            adapter.validate_python(each)
            return each
    return next(_readings(text, hint))


_LENIENT = ConfigDict(allow_inf_nan=False)


def _is_section(hint: Any) -> bool:
    kinds = alternatives(hint)
    return any(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in kinds)


def _readings(text: str, hint: Any) -> Iterator[Any]:
    """Possible interpretations of a text, most specific first.

    A literal of the field; true, false, null or none; JSON; a number; `[a, b]` without quotes; a
    Python tuple `(a, b)`; the text itself; and a list of comma-separated values.
    """
    words = {"true": True, "false": False, "null": None, "none": None}
    listed = [kind for kind in alternatives(hint) if typing.get_origin(kind) is Literal]
    if any(text in typing.get_args(kind) for kind in listed):
        yield text
    is_word = text.lower() in words
    if is_word:
        yield words[text.lower()]
    with contextlib.suppress(ValueError, RecursionError):
        yield json.loads(text)
    with contextlib.suppress(ValueError):
        yield float(text)
    for loader in (ExactNumbers, yaml.BaseLoader) if text[:1] in ("[", "{") else ():
        with contextlib.suppress(ValueError):
            yield read_yaml(text, loader)
    if text.startswith("("):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            yield list(ast.literal_eval(text))
    yield text
    if text and not is_word:
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(f"[{text}]")
        yield [part.strip() for part in text.split(",")]


def differences(recipe: Recipe, other: Recipe) -> list[str]:
    """Differing fields that affect training, as `field: value -> other value`."""
    mine, theirs = flatten(to_fields(recipe)), flatten(to_fields(other))
    changed = [key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)]
    return [
        f"{key}: {mine.get(key)!r} -> {theirs.get(key)!r}"
        for key in sorted(changed)
        if key not in FREE_TO_CHANGE and key.split(".")[0] not in FREE_TO_CHANGE
    ]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a recipe by their dotted paths."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = ((str(index), inner) for index, inner in enumerate(value))
    else:
        return {prefix: value}
    return {
        key: leaf
        for name, inner in pairs
        for key, leaf in flatten(inner, f"{prefix}.{name}" if prefix else name).items()
    }
