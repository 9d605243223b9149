"""Find prompts that several documents of a micro-batch start with, to compute them once.

The second document starts like the first one, so only its last token is new:

    documents   a b c d e | a b c f | g h
    computed    a b c d e           f g h
    index       0 1 2 3 4 | 0 1 2 5 | 6 7     of each token among those that are computed
"""

import bisect
from collections.abc import Sequence

import numpy as np

from finetune.data.rows.store import AT_ONCE, Columns, Rows

WORTH = 0.05
"""Minimum share of repeated tokens: below it, copying queries, keys and values for attention costs
about as much as computing the tokens again."""


def computed_once(documents: Sequence[Columns]) -> np.ndarray | None:
    """Index of each token among the computed ones, (tokens,) int64; None if too few are repeated.

    A document shares its tokens before its first label with the earlier document that has most of
    them in common, and always computes its last token. Computed tokens keep their order.
    """
    repeated = repeated_tokens(documents)
    shared, total = sum(count for count, _ in repeated), sum(len(ids) for ids, _ in documents)
    if shared < WORTH * total:
        return None
    parts, computed = list[np.ndarray](), 0
    for (ids, _), (count, earlier) in zip(documents, repeated, strict=True):
        own = np.arange(computed, computed + len(ids) - count)
        parts.append(np.concatenate([parts[earlier][:count], own]) if count else own)
        computed += len(own)
    return np.concatenate(parts)


def computed_lengths(rows: Rows) -> np.ndarray:
    """Computed tokens of each row if its documents share prompts, else its length.  # (rows,)"""
    if not rows.share_prompts:
        return rows.lengths
    shared = np.zeros(len(rows), dtype=np.int64)
    for index in range(len(rows)):
        numbers = rows.numbers(index)
        if len(numbers) > 1:
            documents = [rows.documents.document(int(number)) for number in numbers]
            shared[index] = sum(count for count, _ in repeated_tokens(documents))
        if index % AT_ONCE == 0:
            rows.documents.release()
    return rows.lengths - shared


def repeated_tokens(documents: Sequence[Columns]) -> list[tuple[int, int]]:
    """Tokens that each document shares with an earlier one, and the number of that document.

    Of all earlier documents in lexicographic order, the neighbors of a document have the longest
    common beginning with it.
    """
    keys, order, found = list[bytes](), list[int](), list[tuple[int, int]]()
    for number, (ids, trained) in enumerate(documents):
        key = ids.astype(">i4").tobytes()  # compares like the tokens
        place = bisect.bisect_left(keys, key)
        labels = np.flatnonzero(trained[1:])
        prompt = int(labels[0]) + 1 if len(labels) else len(ids) - 1
        near = [order[at] for at in (place - 1, place) if 0 <= at < len(order)]
        counts = [(_common(documents[each][0][:prompt], ids[:prompt]), each) for each in near]
        found.append(max(counts, default=(0, number)))
        keys.insert(place, key)
        order.insert(place, number)
    return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two arrays."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
