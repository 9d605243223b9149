"""Choose the documents of each source for an epoch."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from finetune.data.order import permutation
from finetune.errors import FinetuneError
from finetune.recipe import Data

CHOSEN = 2**64 - 2
"""Epoch number whose shuffle selects documents of weighted sources; training never reaches it."""


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
