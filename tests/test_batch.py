"""Rows become tensors whose labels are the trained tokens, padded by position."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from documents import documents_of

from finetune.data.rows.collate import collate
from finetune.data.rows.store import Rows, single_rows


def rows_of(*rows: tuple[list[int], Iterable[int]]) -> Rows:
    """Rows of ids with the positions of their trained tokens."""
    return single_rows(
        documents_of(
            (np.array(ids, np.int32), np.isin(np.arange(len(ids)), list(trained)))
            for ids, trained in rows
        )
    )


def test_rows_are_padded_on_the_right_and_only_trained_tokens_are_labels():
    rows = rows_of(([5, 6, 7, 8], [2, 3]), ([1, 2], [1]), ([9, 9, 9], [2]))
    batch = collate(rows, np.array([1, 0]), pad_id=2, device="cpu")
    assert batch.ids.tolist() == [[1, 2, 2, 2], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[-100, 2, -100, -100], [-100, -100, 7, 8]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (2, 3, 6)
    assert batch.ids.dtype == batch.labels.dtype == batch.attention_mask.dtype == torch.int64


def test_rows_of_one_length_need_no_mask_and_a_first_token_is_never_a_label():
    batch = collate(rows_of(([1, 2], [0, 1]), ([3, 4], [1])), np.array([0, 1]), 0, "cpu")
    assert batch.attention_mask is None
    assert batch.labels.tolist() == [[-100, 2], [-100, 4]]
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (2, 2, 4)


def packed_rows(*packs: list[tuple[list[int], Iterable[int]]]) -> Rows:
    documents = rows_of(*[document for pack in packs for document in pack]).documents
    bounds = np.cumsum([0, *(len(pack) for pack in packs)])
    return Rows(documents, np.arange(len(documents)), bounds, packed=True)


def test_packed_documents_are_concatenated_with_positions_from_zero():
    rows = packed_rows(
        [([1, 2, 3, 4], [0, 1, 2, 3]), ([5, 6], [0, 1])], [([9, 9], [1])], [([7, 8, 9], [0, 2])]
    )
    assert rows.lengths.tolist() == [6, 2, 3]
    batch = collate(rows, np.array([0, 2]), 0, "cpu")
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[-100, 2, 3, 4, -100, 6, -100, -100, 9]]
    assert batch.attention_mask is None
    assert batch.boundaries.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    assert (batch.boundaries.ends.tolist(), batch.boundaries.longest) == ([0, 4, 6, 9], 4)
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (2, 5, 9)


def test_concatenated_rows_have_the_labels_of_padded_rows():
    rows = rows_of(([5, 6, 7, 8], [0, 2, 3]), ([1, 2], [1]), ([9, 9, 9], [2]))
    free = dataclasses.replace(rows, padding_free=True)
    padded = collate(rows, np.array([1, 0]), pad_id=2, device="cpu")
    batch = collate(free, np.array([1, 0]), pad_id=2, device="cpu")
    assert batch.ids.tolist() == [[1, 2, 5, 6, 7, 8]]
    assert batch.labels.tolist() == [[-100, 2, -100, -100, 7, 8]]
    assert batch.attention_mask is None
    assert (batch.boundaries.ends.tolist(), batch.boundaries.longest) == ([0, 2, 6], 4)
    counts = [(each.rows, each.trained_tokens, each.real_tokens) for each in (padded, batch)]
    assert counts == [(2, 3, 6)] * 2
    assert (padded.shape, batch.shape) == ((2, 4), (2, 3))  # the mean of rows side by side
    alone = collate(free, np.array([2]), pad_id=2, device="cpu")
    assert alone.ids.tolist() == [[9, 9, 9]]
    assert alone.boundaries is not None
    nothing = collate(free, np.array([], dtype=np.int64), pad_id=7, device="cpu")
    assert (nothing.ids.tolist(), nothing.rows, nothing.shape) == ([[7, 7]], 0, (1, 2))


def test_no_rows_and_no_packs_give_a_batch_that_trains_nothing():
    for rows in (rows_of(([1, 2], [1])), packed_rows([([1, 2], [1])])):
        batch = collate(rows, np.array([], dtype=np.int64), 7, "cpu")
        assert (batch.ids.tolist(), batch.labels.tolist()) == ([[7, 7]], [[-100, -100]])
        assert batch.attention_mask is None
        assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (0, 0, 0)
    assert batch.boundaries.ends.tolist() == [0, 2]


def test_a_large_pack_on_a_cpu_is_filled_with_a_padding_document():
    """To a multiple of 64; "meta" stands for any other device."""
    for length, slots in ((1_023, 1_023), (1_024, 1_024), (1_025, 1_088), (1_087, 1_088)):
        rows = packed_rows([([5] * 700, range(1, 700)), ([6] * (length - 700), [1])])
        batch = collate(rows, np.array([0]), pad_id=6, device="cpu")
        assert batch.ids.tolist() == [[5] * 700 + [6] * (slots - 700)]
        assert (batch.real_tokens, batch.trained_tokens) == (length, 700)
        assert (batch.labels[0, 702:] == -100).all()
        filled = [slots] if slots > length else []
        assert batch.boundaries.ends.tolist() == [0, 700, length, *filled]
        assert batch.boundaries.positions[0, length:].tolist() == list(range(slots - length))
        assert batch.boundaries.longest == 700
        assert collate(rows, np.array([0]), pad_id=6, device="meta").ids.shape == (1, length)
