"""Find the format of data by its first rows."""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finetune.data.formats import FORMATS, fitting, read_row
from finetune.data.read.columns import ANSWERS, rename
from finetune.data.read.sources import SourceRow, find_source
from finetune.data.samples import Conversation, Sample, sequences_of
from finetune.data.values import RowProblem, Unreadable, kind_of
from finetune.errors import FinetuneError
from finetune.recipe import Data, Kind

LOOKED_AT = 100
"""Rows whose most frequent format is that of the data."""
MOST_CLASSES = 100
"""Different numbers that are read as classes."""
NEAR = 3
"""Formats that are named where none reads a row."""


@dataclass(frozen=True)
class Fit:
    """A format that reads a row, its names for columns that have others, and the sample."""

    format: str
    columns: dict[str, str | None]
    sample: Sample | None


def fit(rows: Iterable[SourceRow], kinds: Collection[Kind]) -> Fit:
    """The format of one of these kinds that reads most of the first rows.

    Raises:
        FinetuneError: there is no row, or no format reads one: with the columns, and what the
            nearest formats lack.
    """
    first = list(islice(rows, LOOKED_AT))
    found = [each for row in first if (each := _fit_of(row.value, kinds)) is not None]
    if found:
        counts = Counter((each.format, *each.columns.items()) for each in found)
        (best, _), *_ = counts.most_common(1)
        return next(each for each in found if (each.format, *each.columns.items()) == best)
    if first:
        raise FinetuneError(f"{first[0].place}: {_why_none(first[0].value, kinds)}")
    raise FinetuneError("data.source: it has no rows")


def _fit_of(row: Any, kinds: Collection[Kind]) -> Fit | None:
    fits = fitting(row, kinds)
    if fits is not None:
        name, columns = fits
        return Fit(name, columns, read_row(name, rename(row, columns)))
    return Fit("prompts", {}, sample) if "prompts" in kinds and (sample := _prompt(row)) else None


def _prompt(row: Any) -> Sample | None:
    try:
        return read_row("prompts", row)
    except RowProblem:
        return None


def _why_none(row: Any, kinds: Collection[Kind]) -> str:
    """Why no format reads a row."""
    if isinstance(row, Unreadable):
        return row.problem
    if not isinstance(row, Mapping):
        return f"is {kind_of(row)}, expected an object with columns"
    there = {name for name, value in row.items() if value is not None}
    named = ", ".join(f"'{name}'" for name in row) or "none"
    if "text" in kinds and not there.intersection(ANSWERS) and _prompt(row) is not None:
        return (
            f"its columns ({named}) have a prompt and no answer: to learn from rewards, give "
            "--method grpo or rloo and reward_funcs=NAME; for other methods, add the answers"
        )
    lacking = sorted(
        (len(set(needed) - there), -len(there.intersection(needed)), name, needed)
        for name, each in FORMATS.items()
        if each.gives in kinds
        for needed in each.columns
        if there.intersection(needed)
    )
    for missing, _, name, _ in lacking[:1]:
        if not missing:  # the columns are there, and a value is wrong
            try:
                read_row(name, row)
            except RowProblem as problem:
                return str(problem)
    near = dict[str, str]()
    for _, _, name, needed in lacking:
        near.setdefault(name, ", ".join(f"'{each}'" for each in needed if each not in there))
    words = [f"'{name}' lacks {columns}" for name, columns in near.items() if columns][:NEAR]
    nearest = f"; {'; '.join(words)}" if words else ""
    return (
        f"no format reads its columns ({named}){nearest}; give another name to a column, such as "
        'data.0.format=question_answer \'data.0.columns={"NAME": "question"}\''
    )


def has_turns(data: Data) -> bool:
    """Whether one of the first rows is a conversation, which needs a chat template."""
    for row in islice(find_source(data).rows(), LOOKED_AT):
        with contextlib.suppress(RowProblem):  # reported when the data is prepared
            sample = read_row(data.format, row.value)
            parts = () if sample is None else sequences_of(sample)
            if any(isinstance(part, Conversation) for part in parts):
                return True
    return False


def labels(rows: Iterable[SourceRow]) -> dict[str, Any]:
    """Fields of a classifier for the labels of these rows: its classes, or a regression.

    Numbers with decimals, or more than `MOST_CLASSES` different ones, are values to predict.
    """
    values = [row.value.get("label") for row in rows if isinstance(row.value, Mapping)]
    several = any(isinstance(value, list) for value in values)
    each = [one for value in values for one in (value if isinstance(value, list) else [value])]
    found = {one for one in each if isinstance(one, str | int | float)}
    numbers = [one for one in found if not isinstance(one, str | bool)]
    measured = any(not float(one).is_integer() for one in numbers) or len(numbers) > MOST_CLASSES
    if measured and not several:
        return {"problem_type": "regression"}
    names = {str(one).lower() if isinstance(one, bool) else str(one).strip() for one in found}
    ordered = sorted(names, key=lambda name: (len(name) if name.isdecimal() else 0, name))
    return {"labels": ordered} | ({"problem_type": "multi_label_classification"} if several else {})
