"""Choose the documents of each packed row: best-fit decreasing over the complete set.

The longest documents are placed first, each into the open slot with the least room that still
fits it (Johnson 1973: at most 11/9 of the minimum number of slots, plus a constant):

    lengths 6 5 4 3 2   slots of 8   ->   6 2 | 5 3 | 4

Documents are never split, and do not attend to each other (`finetune.models.packed_attention`).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to slots.

    Documents of the same length are placed at once: n documents with d different lengths take
    O(n log n + d log d) and a bisection per event. Ties go to the earlier document, so the result
    depends on the lengths only.

    Args:
        lengths: (documents,) tokens of each document, from 1 to `capacity`.
        capacity: Tokens of a slot.

    Returns:
        members, (documents,) int64, and bounds, (slots + 1,) int64: slot i holds the documents
        `members[bounds[i]:bounds[i + 1]]`.
    """
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity)
    order = np.argsort(-lengths, kind="stable")
    slots = np.empty(len(lengths), dtype=np.int64)  # the slot of each document in that order
    rooms = _Rooms(capacity)
    values, counts = np.unique(lengths, return_counts=True)
    start = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        slots[start : start + count] = rooms.place(length, count)
        start += count
    by_slot = np.argsort(slots, kind="stable")
    sizes = np.bincount(slots, minlength=rooms.opened)
    bounds = np.zeros(rooms.opened + 1, dtype=np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return order[by_slot], bounds


class _Rooms:
    """Open slots, grouped by their remaining room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.room: list[int] = []  # different rooms of the open slots, ascending
        self.slots: dict[int, list[np.ndarray]] = {}  # room -> slots, in runs

    def place(self, length: int, count: int) -> np.ndarray:
        """Choose slots for `count` documents of the same length.  # (count,) int64

        After a slot takes one of them it still has the least sufficient room, so it is filled with
        as many as fit before the next slot.
        """
        parts: list[np.ndarray] = []
        while count:
            room, slots = self._take(length, count)
            each = room // length
            used = slots[: -(-count // each)]
            self._give(room, slots[len(used) :])
            placed = np.repeat(used, each)[:count]
            parts.append(placed)
            count -= len(placed)
            last = len(placed) - (len(used) - 1) * each  # documents in the last slot used
            self._give(room - each * length, used[:-1] if last < each else used)
            if last < each:
                self._give(room - last * length, used[-1:])
        return np.concatenate(parts)

    def _take(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """The least room of at least `length`, with its slots; opens new slots if there is none."""
        at = bisect_left(self.room, length)
        if at < len(self.room):
            room = self.room.pop(at)
            return room, np.concatenate(self.slots.pop(room))
        needed = -(-count // (self.capacity // length))
        first, self.opened = self.opened, self.opened + needed
        return self.capacity, np.arange(first, self.opened)

    def _give(self, room: int, slots: np.ndarray) -> None:
        if not room or not len(slots):
            return
        if room not in self.slots:
            insort(self.room, room)
            self.slots[room] = []
        self.slots[room].append(slots)
