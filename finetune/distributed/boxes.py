"""Boxes of a parameter: the N-dimensional blocks that a checkpoint stores.

Any sharding of a tensor is a set of boxes. The rows of an FSDP shard are one box; a range of
flattened elements (a piece of a flat ZeRO buffer) is part of a row, complete rows, and part of a
row:

    elements 2 to 9 of (3, 4)    . . a a    box at (0, 2) of (1, 2)
                                 b b b b    box at (1, 0) of (1, 4)
                                 c c . .    box at (2, 0) of (1, 2)
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Box:
    """Offsets and sizes of a block of a tensor, one per dimension; empty for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, offsets: tuple[int, ...]) -> tuple[slice, ...]:
        """Slices of this box relative to a block that begins at `offsets`."""
        return tuple(
            slice(mine - start, mine - start + size)
            for mine, start, size in zip(self.offsets, offsets, self.sizes, strict=True)
        )

    def shared(self, other: "Box") -> "Box | None":
        """The intersection of two boxes of one tensor; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def boxes_of(shape: tuple[int, ...], start: int, numel: int) -> list[Box]:
    """The boxes of elements [start, start + numel) of a flattened tensor, in order."""
    if not numel:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, before = divmod(start, row)
    last, after = divmod(start + numel, row)  # `after` elements of row `last`
    if first == last:
        return [_in_row(first, box) for box in boxes_of(inner, before, numel)]
    found: list[Box] = []
    if before:
        found += [_in_row(first, box) for box in boxes_of(inner, before, row - before)]
        first += 1
    if first < last:
        found.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + [_in_row(last, box) for box in boxes_of(inner, 0, after)]


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.sizes))
