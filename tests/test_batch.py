"""Rows become tensors whose labels are the trained tokens, padded by position."""

from collections.abc import Iterable

import numpy as np
import torch

from finetune.data.batch import collate
from finetune.data.rows import Rows, pack_rows


def rows_of(*rows: tuple[list[int], Iterable[int]]) -> Rows:
    """Rows of ids with the positions of their trained tokens."""
    return pack_rows(
        [
            (np.array(ids, np.int32), np.isin(np.arange(len(ids)), list(trained)))
            for ids, trained in rows
        ]
    )


def test_rows_are_padded_on_the_right_and_only_trained_tokens_are_labels():
    rows = rows_of(([5, 6, 7, 8], [2, 3]), ([1, 2], [1]), ([9, 9, 9], [2]))
    batch = collate(rows, np.array([1, 0]), pad_id=2, device="cpu")
    assert batch.ids.tolist() == [[1, 2, 2, 2], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[-100, 2, -100, -100], [-100, -100, 7, 8]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (2, 3, 6)
    assert batch.ids.dtype == batch.labels.dtype == batch.attention_mask.dtype == torch.int64


def test_rows_of_one_length_need_no_mask():
    batch = collate(rows_of(([1, 2], [1]), ([3, 4], [1])), np.array([0, 1]), 0, "cpu")
    assert batch.attention_mask is None
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (2, 2, 4)


def test_the_first_token_is_never_a_label():
    batch = collate(rows_of(([1, 2, 3], [0, 1])), np.array([0]), 0, "cpu")
    assert batch.labels.tolist() == [[-100, 2, -100]]
    assert batch.trained_tokens == 1


def test_no_rows_give_a_batch_that_trains_nothing():
    batch = collate(rows_of(([1, 2], [1])), np.array([], dtype=np.int64), 7, "cpu")
    assert batch.ids.tolist() == [[7, 7]]
    assert batch.labels.tolist() == [[-100, -100]]
    assert batch.attention_mask is None
    assert (batch.rows, batch.trained_tokens, batch.real_tokens) == (0, 0, 0)
