"""Choose the rows of each step, as a pure function of the step number.

Rows of global step k are slice k of perm(seed, 0) ++ perm(seed, 1) ++ ...; a step may begin in one
epoch and end in the next, so no step is short and no row is left out. Rows are sorted by length and
cut into micro-batches, which are the same on any number of processes:

    step        7 2 9 4 1 8 3 6               micro_rows=2; here row n has n tokens
    1 process   [9 8] [7 6] [4 3] [2 1]
    2 processes rank 0: [9 8] [4 3]           rank 1: [7 6] [2 1]
"""

import functools

import numpy as np


def rows_of_step(step: int, rows: int, size: int, seed: int) -> np.ndarray:
    """Row indices of a global step; steps are counted from 0.  # (size,) int64"""
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
    """A read-only permutation of 0 .. rows - 1.  # (rows,) int64

    Sorts raw Philox draws keyed by (seed, epoch): NumPy guarantees the stream of a bit generator
    across versions, but not the result of `Generator.permutation` (NEP 19).
    """
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(rows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


def split_rows(
    indices: np.ndarray,
    lengths: np.ndarray,
    micro_rows: int,
    micro_tokens: int | None = None,
    side_by_side: bool = False,
    prompts: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Split rows into micro-batches of similar length, the longest first, to minimize padding.

    Rows with the same prompt stay together, so that as many as possible share it.

    The rows of the step stay the same: its loss is a sum over them, however they are split.

    Args:
        indices: (size,) row indices.
        lengths: (rows,) token slots of every row of the data (`Rows.slots`).
        micro_rows: Rows per micro-batch.
        micro_tokens: Maximum token slots per micro-batch, instead of `micro_rows`; at least the
            longest row.
        side_by_side: Rows of a micro-batch are concatenated without padding.
        prompts: (rows,) the prompt's number of every row of the data (`Rows.prompts`), or None.
    """
    ordered = indices[
        _longest_first(lengths[indices], None if prompts is None else prompts[indices])
    ]
    if micro_tokens is None:
        return [ordered[at : at + micro_rows] for at in range(0, len(ordered), micro_rows)]
    starts, width, filled = list[int](), 0, 0
    for at, length in enumerate(lengths[ordered].tolist()):
        filled += length if side_by_side else width
        if not starts or filled > micro_tokens:
            starts.append(at)
            width = filled = length  # the first row of a micro-batch is its longest
    return np.split(ordered, starts[1:])


def _longest_first(lengths: np.ndarray, prompts: np.ndarray | None) -> np.ndarray:
    """The order of rows by length, or of prompts by their longest row.  # (rows,) int64"""
    if prompts is None:
        return np.argsort(-lengths, kind="stable")
    _, group = np.unique(prompts, return_inverse=True)
    longest = np.zeros(len(lengths), dtype=np.int64)  # of each group
    np.maximum.at(longest, group, lengths)
    return np.lexsort((-lengths, group, -longest[group]))


def of_rank(micro_batches: list[np.ndarray], rank: int, world: int) -> list[tuple[int, np.ndarray]]:
    """The micro-batches of one rank with their numbers; every rank gets the same count.

    Ranks take micro-batches in turn, so all ranks process similar lengths at the same time. A rank
    that gets too few is given empty ones, because it must still take part in the collectives.
    """
    each = -(-len(micro_batches) // world)
    numbers = range(rank, each * world, world)
    nothing = np.empty(0, dtype=np.int64)
    return [
        (number, micro_batches[number] if number < len(micro_batches) else nothing)
        for number in numbers
    ]
