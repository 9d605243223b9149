"""Pair each prompt of a step with the answer of another row, from which KTO estimates the KL."""

import dataclasses

import numpy as np

from finetune.data.rows.order import permutation
from finetune.data.rows.store import Columns, Rows, composed, single_rows


def mismatched(rows: Rows, chosen: np.ndarray, epoch: int, seed: int, max_length: int) -> Rows:
    """Combine the prompt of each document of a step with the answer of the previous document.

    The first document gets the answer of the last. Documents are in the order of the shuffle of
    `epoch`, each once, so the partners do not depend on ranks, micro-batches or packing:

        step     prompt a, answer a    prompt b, answer b    prompt c, answer c
        here     prompt a, answer c    prompt b, answer a    prompt c, answer b

    Args:
        rows: Rows of one document each, or packed rows.
        chosen: (rows,) indices of the step's rows.
        epoch: Epoch in which the step begins.
        seed: Seed of the shuffle.
        max_length: Tokens at which a document is truncated; if its prompt fills them, it is
            dropped.
    """
    parts = [rows.numbers(int(index)) for index in chosen]
    numbers = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    place = np.empty(len(rows.used), dtype=np.int64)
    place[permutation(len(rows.used), seed, epoch)] = np.arange(len(rows.used))
    ordered = numbers[np.argsort(place[np.searchsorted(rows.used, numbers)])]
    documents = [rows.documents.document(int(number)) for number in ordered]
    joined = [
        _joined(documents[index], documents[index - 1], max_length)
        for index in range(len(documents))
        if len(documents) > 1
    ]
    made = single_rows(composed([each for each in joined if each[1].any()]))
    return dataclasses.replace(made, padding_free=rows.side_by_side)


def _joined(asked: Columns, reply: Columns, max_length: int) -> Columns:
    """The prompt of one document followed by the answer of another."""
    (ids, trained), (other, answered) = asked, reply
    prompt, start = int(trained.argmax()), int(answered.argmax())
    whole = np.concatenate([ids[:prompt], other[start:]])
    labels = np.concatenate([np.zeros(prompt, bool), answered[start:]])
    return whole[:max_length], labels[:max_length]
