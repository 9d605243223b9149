"""Read sources in buffers: which rows a buffer has is a function of the recipe alone.

The files of a source are read one after another, in an order that the seed draws for each epoch. A
buffer of one source ends with its epoch, so each row is read once in an epoch; several sources
share each buffer by their weights, and one that ends begins again:

    stream_buffer=4   files a: 1 2 3, b: 4 5 6    [1 2 3 4] [5 6] [4 5 6 1] [2 3]
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np

from finetune.data.fingerprint import version_of
from finetune.data.read.arrow import size_of
from finetune.data.read.files import Place, read_file
from finetune.data.read.hub import hub_parts, hub_version
from finetune.data.read.remote import CHANGED
from finetune.data.read.sources import Source, SourceRow
from finetune.data.rows.order import permutation
from finetune.errors import FinetuneError

Versions = list[dict[str, list[Any]]]


@dataclass
class Position:
    """How far a source has been read."""

    epoch: int = 0
    file: int = 0
    """Files of the epoch that are behind it."""
    row: int = 0
    byte: int = 0
    """The `Place` in the file."""
    taken: int = 0
    """Rows of the epoch that were read."""


class SourceReader:
    """Reads a source from a position on, epoch after epoch."""

    def __init__(self, source: Source, seed: int, position: Position) -> None:
        self._source, self._seed, self._at = source, seed, position
        self._parts: Any = source.files or hub_parts(source.data)
        self._sizes = list(map(size_of, source.files))
        self._rows: Iterator[SourceRow] | None = None

    @property
    def names(self) -> list[str]:
        """The files of the source, in their order there."""
        return [str(part) for part in self._parts]

    @property
    def position(self) -> list[int]:
        """The position, as numbers from which `Position` is made again."""
        return list(astuple(self._at))

    def take(self, count: int, across: bool) -> Iterator[SourceRow]:
        """Yield the next `count` rows; fewer if the epoch ends, unless they go `across` epochs.

        Raises:
            FinetuneError: a file cannot be read, or an epoch has no row.
        """
        while count:
            if self._rows is None:
                self._rows = self._epoch()
            found = 0
            for row in islice(self._rows, count):
                found += 1
                yield row
            count -= found
            if count:  # the epoch has ended
                at, self._rows = self._at, None
                if not at.taken:
                    raise FinetuneError(f"{self._source.data.source}: it has no rows")
                at.epoch, at.file, at.row, at.byte, at.taken = at.epoch + 1, 0, 0, 0, 0
                if found and not across:
                    return

    def _epoch(self) -> Iterator[SourceRow]:
        """The rows of the epoch behind the position, which moves with them."""
        at, data, parts = self._at, self._source.data, self._parts
        order = permutation(len(parts), self._seed, at.epoch)
        if data.first is not None:
            order = np.arange(len(parts))  # its first rows are those that are prepared
        while at.file < len(parts):
            number = int(order[at.file])
            part, place = parts[number], Place(at.row, at.byte)
            rows = read_file(part, place) if self._source.files else part.rows(place)
            for row, value in rows:
                if at.taken == data.first:
                    return
                at.row, at.byte, at.taken = place.row, place.byte, at.taken + 1
                yield self._source.rewritten(SourceRow(str(part), row, value))
            if self._source.files and size_of(part) != self._sizes[number]:
                raise FinetuneError(CHANGED.format(part))
            at.file, at.row, at.byte = at.file + 1, 0, 0


def buffer_of(
    readers: list[SourceReader], sources: list[Source], window: int, size: int
) -> list[Iterator[SourceRow]]:
    """The rows of each source in buffer `window` (from 0) of `size` rows."""
    if len(readers) == 1:
        return [readers[0].take(size, across=False)]
    weights = [Fraction(each.data.weight or 1) for each in sources]
    shares = [weight / sum(weights) for weight in weights]
    counts = [int(size * (window + 1) * each) - int(size * window * each) for each in shares]
    return [reader.take(n, across=True) for reader, n in zip(readers, counts, strict=True)]


def versions_of(sources: list[Source]) -> Versions:
    """Version and bytes of each file of each source, by name; a hub data set counts as one."""
    return [
        {name: rest for name, *rest in map(version_of, source.files)}
        or {source.data.source: [hub_version(source.data), None]}
        for source in sources
    ]
