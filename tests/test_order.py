"""The rows of a step depend on the step alone, not on processes, restarts or the past."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.order import micro_batches, permutation, rows_of_step


def test_the_order_is_this_one():
    """Written down, so that a new version of NumPy cannot change what a resumed run sees."""
    assert permutation(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, 0, 1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert permutation(8, 7, 0).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**31 - 1))
def test_steps_are_slices_of_epoch_after_epoch(rows: int, size: int, seed: int):
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
    again = [rows_of_step(step, 13, 8, 5) for step in range(1001)][1000]
    assert np.array_equal(late, again)


def test_an_order_that_is_shared_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        permutation(8, 0, 0)[0] = 1


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_micro_batches_are_the_same_on_any_number_of_processes(world: int):
    indices = rows_of_step(3, 50, 16, 0)
    ranks = [micro_batches(indices, 2, rank, world) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {8 // world}
    joined = [batch for rank in ranks for batch in as_lists(rank)]
    assert joined == indices.reshape(8, 2).tolist()


def test_a_rank_takes_neighbouring_micro_batches():
    indices = np.array([7, 2, 9, 4, 1, 8, 3, 6])
    assert as_lists(micro_batches(indices, 2, 0, 2)) == [[7, 2], [9, 4]]
    assert as_lists(micro_batches(indices, 2, 1, 2)) == [[1, 8], [3, 6]]


def test_rows_that_run_out_leave_empty_micro_batches_to_the_last_ranks():
    indices = np.arange(5)
    assert as_lists(micro_batches(indices, 2, 0, 3)) == [[0, 1]]
    assert as_lists(micro_batches(indices, 2, 2, 3)) == [[4]]
    assert as_lists(micro_batches(indices, 4, 0, 3)) == [[0, 1, 2, 3]]
    assert as_lists(micro_batches(indices, 4, 1, 3)) == [[4]]
    assert as_lists(micro_batches(indices, 4, 2, 3)) == [[]]


@given(st.integers(0, 50), st.integers(1, 7), st.integers(1, 5))
def test_every_row_is_in_one_micro_batch_and_ranks_keep_step(rows: int, micro: int, world: int):
    ranks = [micro_batches(np.arange(rows), micro, rank, world) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    assert [row for rank in ranks for batch in rank for row in batch.tolist()] == list(range(rows))
