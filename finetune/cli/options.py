"""Options shared by several commands, and the types of their values."""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.checkpoints.copies import opened
from finetune.errors import FinetuneError
from finetune.runs.addresses import is_address
from finetune.runs.run import refuse_scheme

if TYPE_CHECKING:
    from finetune.checkpoints.resume import Resume


def number(
    kind: type[float], low: float, high: float, expected: str
) -> Callable[[str], int | float]:
    """The type of an option with numbers of a kind from `low` to `high`."""

    def read(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if low <= (found := kind(text)) <= high:
                return found
        raise argparse.ArgumentTypeError(f"got '{text}', expected {expected}")

    return read


count = number(int, 1, math.inf, "a whole number of at least 1")
whole_number = number(int, 0, math.inf, "a whole number")
port = number(int, 0, 65535, "a port from 0 to 65535")
minutes = number(float, 1e-9, 1e6, "minutes, such as 30 or 0.5")
seconds_since_1970 = number(float, 0, math.inf, "seconds since 1970: date +%s")


def local_path(text: str) -> Path:
    try:
        return refuse_scheme(Path(text))
    except FinetuneError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_word(text: str) -> str:
    """A run, a model or a URL; a run on an object store is copied to the cache."""
    if text.startswith(("http://", "https://")):
        return text
    try:
        return opened(text)
    except FinetuneError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_output(text: str) -> str | Path:
    """A path, or the address of a store as it is."""
    return text if is_address(text) else Path(text)


KINDS: dict[str, Callable[[str], Any]] = {
    "N": count, "COUNT": whole_number, "INTEGER": int, "NUMBER": float, "GB": float,
    "GB/s": float, "MINUTES": minutes, "TIME": seconds_since_1970, "PORT": port,
    "PATH": local_path, "RUN": run_word, "RUN_OR_ADDRESS": run_output,
}  # fmt: skip
"""Types of values by their names in usages; other names are of texts."""


def add(parser: argparse.ArgumentParser, table: str) -> None:
    """Add arguments from a table, one on each line.

    --rows N=8    its name, the kind of its value and a default, two spaces, its help
    --all a|b     one of these words
    --json        a switch
    run RUN       by its place; with a default it may be left out, with + it is repeated
    """
    line = r"^ *(\S+)(?: ([^\s=+]+)(\+)?(?:=(\S+))?)?  +(.+)$"
    for name, kind, repeated, default, about in re.findall(line, table, re.MULTILINE):
        given: dict[str, Any] = {"help": about} | ({"default": default} if default else {})
        if "|" in kind:
            given["choices"] = kind.split("|")
        elif name.startswith("-"):
            given |= {"type": KINDS.get(kind, str), "metavar": kind} if kind else SWITCH
        else:
            given |= {"type": KINDS.get(kind, str)}
            given |= {"nargs": "+" if repeated else "?"} if repeated or default else {}
        parser.add_argument(name, **given)


SWITCH = {"action": "store_true"}


def override_words(parser: argparse.ArgumentParser, such_as: str = "optim.lr=1e-4") -> None:
    about = f"such as {such_as}"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=about)


def recipe_words(parser: argparse.ArgumentParser, what: str = "name or file of a recipe") -> None:
    parser.add_argument("recipe", help=what)
    override_words(parser)


def backend_words(parser: argparse.ArgumentParser, elastic: bool = False) -> None:
    from finetune.backend.axes import FLAGS, ROTATIONS, SCHEDULES

    add(parser, "--backend NAME  name or YAML; by default the recipe's")
    parser.add_argument(
        "--processes",
        type=(lambda text: text if text == "auto" else count(text)) if elastic else count,
        metavar="N|auto" if elastic else "N",
        help="by default the backend's" + "; auto: those that fit the machines" * elastic,
    )
    lines = [f"--{field} N  {what}" for field, what in FLAGS.items()]
    rotation = "keys and values with --context: gathered, or passed around (ring attention)"
    lines += [
        f"--schedule {'|'.join(SCHEDULES)}  schedule of a pipeline",
        f"--rotation {'|'.join(ROTATIONS)}  {rotation}",
        "--shard-size N  hsdp: processes that share one copy; by default those of a node",
        "--precision bf16|fp16|fp32  instead of the backend's",
    ]
    add(parser, "\n".join(lines))


def axes_of(arguments: argparse.Namespace) -> dict[str, int | str | None]:
    """Given sizes of axes, schedule and rotation, by the fields of `Axes`."""
    from finetune.backend.axes import FLAGS, WORDS

    return {field: getattr(arguments, field) for field in (*FLAGS, *WORDS)}


def run_words(parser: argparse.ArgumentParser) -> None:
    output = "run directory, or s3://...; by default runs/RECIPE"
    add(parser, f"--output RUN_OR_ADDRESS  {output}")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        choices=("yes", "auto"),
        metavar="auto",
        help="continue from the newest checkpoint; `--resume auto` starts if there is none",
    )
    table = """
    --nvme-path PATH  local disk for zero3_nvme
    --timeout MINUTES=30  minutes that a rank waits for others
    --profile  trace the third step, and print where its time went
    --end-by TIME  save and end with 75 in time for this moment, in seconds since 1970
    --no-plot  do not draw loss.png at the end
    """
    add(parser, table)


def output_of(arguments: argparse.Namespace) -> str | Path:
    """The given run directory, or the default of the recipe."""
    return arguments.output or Path("runs") / Path(arguments.recipe).stem


def resume_of(arguments: argparse.Namespace) -> "Resume":
    return "auto" if arguments.resume == "auto" else arguments.resume is not None


def spelt(
    parser: argparse.ArgumentParser, values: Mapping[str, object], without: Container[str]
) -> list[str]:
    """Options with their values as words, but those that are not given, or named in `without`."""
    words: list[str] = []
    for action in parser._actions:
        value = values.get(action.dest)
        if action.option_strings and action.dest not in without and value not in (None, 0):
            words += [action.option_strings[0], *([] if value is True else [str(value)])]
    return words


def without_bars() -> None:
    """Disable transformers' own progress bars and warnings."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
