"""Which documents share a slot: best-fit decreasing over the whole set.

The longest documents are placed first, each into the open slot with the least room that still
holds it (Johnson 1973: at most 11/9 of the fewest possible slots and a constant):

    lengths 6 5 4 3 2   slots of 8   ->   6 2 | 5 3 | 4

Documents are only laid side by side: none is cut, and none sees another (`finetune.models.packed_attention`).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents in the order of their slots, and where each slot begins in that order.

    Documents of one length are placed all at once: n documents with d different lengths take
    O(n log n + d log d) and a bisection per event. Ties go to the earlier document, so the result
    is a function of the lengths.

    Args:
        lengths: (documents,) tokens of each, from 1 to `capacity`.
        capacity: tokens of a slot.

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
    """Open slots by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.room: list[int] = []  # rooms of which there are slots, ascending
        self.slots: dict[int, list[np.ndarray]] = {}  # room -> slots, in runs

    def place(self, length: int, count: int) -> np.ndarray:
        """Slots of `count` documents of a length.  # (count,) int64

        A slot that takes one of them has the least room of all that still hold the next, so it
        takes as many as fit before another slot is looked at.
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
        """The least room of at least a length, with its slots; new slots where there is none."""
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
