"""The rows of each step, as a pure function of the step.

Rows of global step k are slice k of perm(seed, 0) ++ perm(seed, 1) ++ ...; a step may begin in one
epoch and end in the next, so that no step is short and no row is left out. Cut by length into
micro-batches, the same step is the same micro-batches on any number of processes:

    step        7 2 9 4 1 8 3 6               micro_rows=2; here a row is as long as its number
    1 process   [9 8] [7 6] [4 3] [2 1]
    2 processes rank 0: [9 8] [4 3]           rank 1: [7 6] [2 1]
"""

import functools

import numpy as np


def rows_of_step(step: int, rows: int, size: int, seed: int) -> np.ndarray:
    """Row numbers of a global step, counted from 0.  # (size,) int64"""
    position, taken = step * size, 0
    parts = []
    while taken < size:
        epoch, offset = divmod(position + taken, rows)
        part = permutation(rows, seed, epoch)[offset : offset + size - taken]
        parts.append(part)
        taken += len(part)
    return np.concatenate(parts)


@functools.lru_cache(maxsize=4)
def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A read-only shuffle of 0 .. rows - 1.  # (rows,) int64

    Sorted by raw draws of Philox keyed by (seed, epoch): NumPy keeps the stream of a bit generator
    the same across versions, but not what `Generator.permutation` makes of it (NEP 19).
    """
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(rows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


def cut(
    indices: np.ndarray,
    lengths: np.ndarray,
    micro_rows: int,
    micro_tokens: int | None = None,
    side_by_side: bool = False,
) -> list[np.ndarray]:
    """Micro-batches of rows of like length, the longest first, so that little is padded.

    Which rows make a step is not touched: the loss is a sum over them, however they are cut.

    Args:
        indices: (size,) row numbers.
        lengths: (rows,) token slots of every row of the data (`Rows.slots`).
        micro_rows: Rows of a micro-batch.
        micro_tokens: Instead, the most token slots of a micro-batch; at least the longest row.
        side_by_side: Rows of a micro-batch are end to end, and nothing is padded.
    """
    ordered = indices[np.argsort(-lengths[indices], kind="stable")]
    if micro_tokens is None:
        return [ordered[at : at + micro_rows] for at in range(0, len(ordered), micro_rows)]
    starts, width, filled = list[int](), 0, 0
    for at, length in enumerate(lengths[ordered].tolist()):
        filled += length if side_by_side else width
        if not starts or filled > micro_tokens:
            starts.append(at)
            width = filled = length  # the first row of a micro-batch is its longest
    return np.split(ordered, starts[1:])


def deal(micro_batches: list[np.ndarray], rank: int, world: int) -> list[tuple[int, np.ndarray]]:
    """The micro-batches of one rank, each with its number: equally many on every rank.

    Ranks take them in turn, so that those of one length run at one time on all of them. Where they
    run out a rank gets empty ones, because it must still take part in the others' collectives.
    """
    each = -(-len(micro_batches) // world)
    numbers = range(rank, each * world, world)
    nothing = np.empty(0, dtype=np.int64)
    return [
        (number, micro_batches[number] if number < len(micro_batches) else nothing)
        for number in numbers
    ]
