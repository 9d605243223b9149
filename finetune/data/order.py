"""Which rows a step trains on: a function of the step, without any state.

Rows of global step k are slice k of perm(seed, 0) ++ perm(seed, 1) ++ ...; a step may begin in one
epoch and end in the next, so that no step is short and no row is left out. Cut into micro-batches,
the same step is the same micro-batches on any number of processes:

    step        [ 7 2 9 4 | 1 8 3 6 ]         micro_rows=2
    2 processes rank 0: [7 2] [9 4]           rank 1: [1 8] [3 6]
    4 processes [7 2]   [9 4]   [1 8]   [3 6]
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


def micro_batches(indices: np.ndarray, micro_rows: int, rank: int, world: int) -> list[np.ndarray]:
    """The micro-batches of one rank: equally many on every rank, the last ones maybe empty.

    Training divides evenly. In evaluation the rows may run out, and a rank that has none left gets
    empty micro-batches, because it must still take part in the collectives of the others.
    """
    accumulation = -(-len(indices) // (micro_rows * world))
    first = rank * accumulation
    return [
        indices[chunk * micro_rows : (chunk + 1) * micro_rows]
        for chunk in range(first, first + accumulation)
    ]
