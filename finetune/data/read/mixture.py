"""Choose the documents that are held out, and those of each source for an epoch."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from finetune.data.rows.order import permutation
from finetune.errors import FinetuneError
from finetune.recipe import Data

HELD_OUT = 2**64 - 1
"""Epoch number whose shuffle selects the held-out rows; training never reaches it."""
CHOSEN = 2**64 - 2
"""Epoch number whose shuffle selects documents of weighted sources; training never reaches it."""


def hold_out(rows: np.ndarray, origins: np.ndarray, least: int, seed: int) -> np.ndarray:
    """The rows that are held out for evaluation, selected by the seed, sorted.  # (chosen,) int64

    All that one row of a file gave, such as several pairs, is held out together, so there can be a
    few more than `least`.

    Args:
        rows: (rows,) row numbers.
        origins: (rows, 2) file of each, and its row in the file.

    Raises:
        FinetuneError: no row would be left to train on.
    """
    _, group = np.unique(origins, axis=0, return_inverse=True)
    drawn = group[permutation(len(rows), seed, HELD_OUT)]
    _, first = np.unique(drawn, return_index=True)
    groups = drawn[np.sort(first)]
    sizes = np.bincount(group)[groups]
    chosen = np.sort(rows[np.isin(group, groups[np.cumsum(sizes) - sizes < least])])
    if len(chosen) == len(rows):
        raise FinetuneError(
            f"eval_rows: {least} rows held out of {len(rows)} leave none to train on; "
            f"set eval_rows below {len(rows)}"
        )
    return chosen


def mix(
    members: Sequence[np.ndarray], sources: Sequence[Data], seed: int
) -> tuple[np.ndarray, ...]:
    """The documents of each source in one epoch.

    Without weights, each document occurs `repeat` times. With weights w, source i of n_i documents
    contributes floor(w_i min_j(n_j / w_j)) documents, selected by the seed: the longest epoch with
    these shares in which no document occurs twice. All epochs use the same documents.

    Args:
        members: Document numbers of each source.

    Raises:
        FinetuneError: a source would contribute no document.
    """
    weights = [None if data.weight is None else Fraction(data.weight) for data in sources]
    scale = min((len(m) / w for m, w in zip(members, weights, strict=True) if w), default=None)
    mixed: list[np.ndarray] = []
    for part, weight, data in zip(members, weights, sources, strict=True):
        if weight is None or scale is None:
            mixed.append(np.tile(part, data.repeat))
        else:
            chosen = permutation(len(part), seed, CHOSEN)[: int(weight * scale)]
            if not len(chosen):
                raise FinetuneError(
                    f"data.weight: {data.weight} gives no row of {data.source}: it is too small "
                    "compared to the other weights; raise it, or leave the source out"
                )
            mixed.append(part[np.sort(chosen)])
    return tuple(mixed)
