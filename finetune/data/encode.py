"""From a source of data to rows of token ids, with a tally of what became of its samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from finetune.data.formats import RowProblem, read_row
from finetune.data.render import Chat, Row
from finetune.data.rows import Columns
from finetune.data.sources import Source, SourceRow
from finetune.errors import FinetuneError
from finetune.recipe import Batch, Data, Recipe

MOST_PROBLEMS = 10
FIELDS = ("samples", "passed_over", "untrained", "dropped", "truncated", "split")
"""The numbers of a tally that are counted over all sources."""


@dataclass
class Tally:
    """What became of the samples of one source."""

    data: Data
    samples: int = 0
    """Rows that were read."""
    passed_over: int = 0
    """Samples that the format leaves out."""
    untrained: int = 0
    """Rows left out because the model would not be trained to say any of their tokens."""
    dropped: int = 0
    """Samples left out for their length."""
    truncated: int = 0
    """Samples cut to length."""
    split: int = 0
    """Samples cut into several rows."""
    overlong: int = 0
    """Samples longer than allowed, whatever became of them."""
    longest_sample: int = 0
    """Tokens of the longest sample, before it was cut."""
    longest_place: str = ""
    rows: list[Columns] = field(default_factory=list)


class Problems:
    """What is wrong with the data; reading goes on until there is enough to say.

    The same problem of several rows is told once.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}  # what -> places

    @property
    def enough(self) -> bool:
        return sum(len(places) for places in self.found.values()) >= MOST_PROBLEMS

    def add(self, place: str, problem: str) -> None:
        self.found.setdefault(problem, []).append(place)

    def add_all(self, problems: Iterable[str]) -> None:
        """Problems that say themselves where they are."""
        for problem in problems:
            self.add("", problem)

    def raise_any(self) -> None:
        """Raise FinetuneError where there is a problem."""
        if not self.found:
            return
        told = []
        for problem, places in self.found.items():
            more = f" (and {len(places) - 1} more rows)" if len(places) > 1 else ""
            told.append(f"{places[0]}{more}: {problem}" if places[0] else problem)
        if self.enough:
            told.append("reading stopped here; there may be more")
        raise FinetuneError(*told)


def encode_source(recipe: Recipe, chat: Chat, source: Source, problems: Problems) -> Tally:
    """Encode the rows of a source until there are enough problems."""
    tally = Tally(source.data)
    try:
        for row in islice(source.rows(), source.data.first):
            tally.samples += 1
            _encode_row(recipe, chat, row, tally, problems)
            if problems.enough:
                break
    except FinetuneError as error:  # a file that cannot be read any further
        problems.add_all(error.problems)
    return tally


def check_source(tally: Tally, batch: Batch) -> Iterator[str]:
    """What is wrong with a source as a whole."""
    source, longest = tally.data.source, tally.longest_sample
    if not tally.samples:
        yield f"{source}: it holds no rows"
    elif batch.overlong == "error" and tally.overlong:
        yield (
            f"{source}: {tally.overlong} of {tally.samples} rows are longer than "
            f"batch.max_length={batch.max_length} tokens, the longest {longest} "
            f"({tally.longest_place}); set batch.max_length={longest}, or batch.overlong to "
            "drop, truncate or split"
        )
    elif not tally.rows:
        yield (
            f"{source}: none of its {tally.samples} rows is left to train on "
            f"({tally.untrained} without a trained token, {tally.dropped} longer than "
            f"batch.max_length={batch.max_length}, {tally.passed_over} passed over by format "
            f"'{tally.data.format}')"
        )


def _encode_row(
    recipe: Recipe, chat: Chat, row: SourceRow, tally: Tally, problems: Problems
) -> None:
    try:
        sample = read_row(tally.data.format, row.value)
        if sample is None:
            tally.passed_over += 1
        else:
            _add(tally, recipe.encode(sample, chat), recipe.batch, row.place)
    except RowProblem as error:
        problems.add(row.place, str(error))
    except FinetuneError as error:
        for problem in error.problems:
            problems.add(row.place, problem)


def _add(tally: Tally, row: Row, batch: Batch, place: str) -> None:
    """Put an encoded sample among the rows, as the rule for overlong ones says."""
    columns = (np.array(row.ids, dtype=np.int32), np.array(row.trained, dtype=bool))
    length = len(row.ids)
    if length > tally.longest_sample:
        tally.longest_sample, tally.longest_place = length, place
    pieces = [columns]
    if length > batch.max_length:
        tally.overlong += 1
        match batch.overlong:
            case "error":
                return
            case "drop":
                tally.dropped += 1
                return
            case "truncate":
                tally.truncated += 1
                pieces = [(columns[0][: batch.max_length], columns[1][: batch.max_length])]
            case "split":
                tally.split += 1
                pieces = list(split(columns, batch.max_length))
    for ids, trained in pieces:
        trained[:1] = False  # the first token of a row follows nothing
        if trained.any():
            tally.rows.append((ids, trained))
        else:
            tally.untrained += 1


def split(row: Columns, max_length: int) -> Iterator[Columns]:
    """Pieces of a row that together train each of its tokens once.

    The last token of a piece is also the first of the next one, where it is context only:

        a b c d e f g   max_length 4   ->   a b c d | d e f g
    """
    ids, trained = row
    step = max(1, max_length - 1)
    for start in range(0, max(1, len(ids) - 1), step):
        yield ids[start : start + max_length], trained[start : start + max_length].copy()
