"""The memory that a checkpoint is copied to on a GPU, filled from CPU tensors by the same code."""

import datetime

import pytest
import torch
from conftest import Tiny
from safetensors.torch import save

from finetune import Options, Run, catalog
from finetune.checkpoints.checkpoint import State, take
from finetune.checkpoints.staging import ALIGNMENT, Staging
from finetune.distributed.base import Engine
from finetune.distributed.build import build
from finetune.planner import plan
from finetune.training.worker import Worker

CPU = torch.device("cpu")


class Late(Staging):
    """A GPU at its slowest: nothing is copied before `wait`, and then in the order of the calls."""

    def begin(self) -> None:
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().begin()

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        found = super().copy(torch.full_like(values, -1))
        self.queued.append((found, values))
        return found

    def wait(self) -> None:
        for found, values in self.queued:
            found.copy_(values)
        self.queued.clear()


@pytest.fixture(scope="module")
def engine(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine of a training with an adapter and trained embeddings, after two steps."""
    place = tmp_path_factory.mktemp("trained")
    adapter = {"r": 8, "modules_to_save": ["embed_tokens"]}
    recipe = catalog.from_fields(tiny.fields(adapter=adapter, max_steps=2))
    settled = plan(recipe, "single", 1, "fp32")
    made = build(settled, place / "offload", datetime.timedelta(minutes=5))
    Worker(made, Run(place / "run"), Options(place / "run")).train()
    return made


def as_bytes(state: State) -> bytes:
    return save(state.tensors)


def test_states_in_memory_that_is_kept_are_those_in_memory_of_their_own(engine):
    expected = take(engine, Staging(CPU))
    assert {key.split("|")[1] for key in expected.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    assert {tuple(each) for each in expected.scalars.values()} == {("step",)}
    staging = Staging(CPU, keep=True)
    assert as_bytes(take(engine, staging)) == as_bytes(expected)
    assert staging.buffer is None  # of a single checkpoint, nothing is kept
    places: set[int] = set()
    for _ in range(2):
        state = take(engine, staging)
        assert (as_bytes(state), state.scalars) == (as_bytes(expected), expected.scalars)
        places.add(staging.buffer.data_ptr())
        ours = {each.untyped_storage().data_ptr() for each in state.tensors.values()}
        assert ours == {staging.buffer.data_ptr()}
    assert len(places) == 1
    size = sum(each.nbytes for each in expected.tensors.values())
    assert 0 <= len(staging.buffer) - size < ALIGNMENT * len(expected.tensors)
    staging.release()
    assert staging.buffer is None


@pytest.mark.parametrize("keep", [False, True])
def test_no_copy_is_read_before_all_are_waited_for(engine, keep):
    expected, late = as_bytes(take(engine, Staging(CPU))), Late(CPU, keep)
    for _ in range(2):
        assert as_bytes(take(engine, late)) == expected


def test_a_state_that_grew_has_memory_of_its_own_and_then_a_larger_buffer():
    staging, sizes = Staging(CPU, keep=True), [3, 3, 5, 5]
    held: list[int] = []
    for size in sizes:
        staging.begin()
        rows = [torch.full((size, 1), float(value), dtype=torch.bfloat16) for value in (1, 2)]
        copies = [staging.copy(each.T) for each in rows]
        staging.wait()
        assert [each.tolist() for each in copies] == [[[1.0] * size], [[2.0] * size]]
        held.append(0 if staging.buffer is None else len(staging.buffer))
    assert held == [0, 64 + 2 * 3, 64 + 2 * 3, 64 + 2 * 5]
