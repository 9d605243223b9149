"""The rows of a step depend on the step alone, not on processes, restarts or the past."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.rows.order import of_rank, permutation, rows_of_step, split_rows


def test_the_order_is_this_one():
    """Written down, so that a new version of NumPy cannot change what a resumed run sees."""
    assert permutation(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, 0, 1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert permutation(8, 7, 0).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**31 - 1))
def test_steps_are_slices_of_epoch_after_epoch(rows, size, seed):
    steps = 3 * rows // size + 2
    seen = np.concatenate([rows_of_step(step, rows, size, seed) for step in range(steps)])
    epochs = np.concatenate([permutation(rows, seed, e) for e in range(len(seen) // rows + 1)])
    assert np.array_equal(seen, epochs[: len(seen)])
    assert all(len(rows_of_step(step, rows, size, seed)) == size for step in (0, steps))


def test_every_epoch_holds_every_row_once_in_its_own_order():
    epochs = [permutation(100, 3, epoch) for epoch in range(4)]
    assert all(sorted(epoch.tolist()) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    assert not np.array_equal(permutation(100, 4, 0), epochs[0])


def test_a_step_is_the_same_when_it_is_asked_for_alone():
    permutation.cache_clear()
    late = rows_of_step(1000, 13, 8, 5)
    assert np.array_equal(late, [rows_of_step(step, 13, 8, 5) for step in range(1001)][1000])


def test_an_order_that_is_shared_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        permutation(8, 0, 0)[0] = 1


LENGTHS = np.arange(10)
"""Rows as long as their numbers."""
ROWS = np.array([7, 2, 9, 4, 1, 8, 3, 6])
PROMPTS = np.array([5, 5, 3, 3, 5, 3, 3, 5, 4, 4])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((ROWS, LENGTHS, 2), [[9, 8], [7, 6], [4, 3], [2, 1]]),  # like lengths, the longest first
        ((ROWS[[6, 4, 1]], np.full(10, 5), 2), [[3, 1], [2]]),  # the order of the seed
        # Rows of one prompt stay together, the prompt with the longest row first.
        ((ROWS, LENGTHS, 2, None, False, PROMPTS), [[9, 8], [7, 4], [1, 6], [3, 2]]),
        # 2 x 9, 2 x 7 and 4 x 4 slots; side by side 17, 17 and 6.
        ((ROWS, LENGTHS, 1, 18), [[9, 8], [7, 6], [4, 3, 2, 1]]),
        ((ROWS, LENGTHS, 1, 18, True), [[9, 8], [7, 6, 4], [3, 2, 1]]),
    ],
    ids=["lengths", "seed", "prompts", "slots", "side by side"],
)
def test_micro_batches_hold_rows_of_like_length_and_the_slots_that_they_are_given(asked, expected):
    assert [each.tolist() for each in split_rows(*asked)] == expected


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(20, 60) | st.none(),
    st.booleans(),
    st.integers(1, 5),
)
def test_every_row_is_in_one_micro_batch_and_ranks_keep_step(
    lengths, micro_rows, micro_tokens, packed, world
):
    sizes, indices = np.array(lengths), permutation(len(lengths), 0, 0)
    cuts = split_rows(indices, sizes, micro_rows, micro_tokens, packed)
    for each in cuts:
        slots = sizes[each].sum() if packed else sizes[each].max() * len(each)
        assert len(each) <= micro_rows if micro_tokens is None else slots <= micro_tokens
    ranks = [of_rank(cuts, rank, world) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    dealt = dict(each for rank in ranks for each in rank)
    assert sorted(dealt) == list(range(len(ranks[0]) * world))
    together = [dealt[number] for number in sorted(dealt)]
    assert [each.tolist() for each in together[: len(cuts)]] == [each.tolist() for each in cuts]
    assert sorted(row for each in together for row in each.tolist()) == list(range(len(lengths)))


def test_ranks_take_micro_batches_in_turn_and_the_last_get_empty_ones():
    cuts = split_rows(np.array([7, 2, 9, 4, 1]), LENGTHS, 2)
    for rank, world, expected in (
        (0, 2, [(0, [9, 7]), (2, [1])]), (1, 2, [(1, [4, 2]), (3, [])]),
        (2, 4, [(2, [1])]), (3, 4, [(3, [])]),
    ):  # fmt: skip
        taken = of_rank(cuts, rank, world)
        assert [(number, batch.tolist()) for number, batch in taken] == expected
