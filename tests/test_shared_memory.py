"""What FSDP's processes exchange through memory that they share is what they would over gloo."""

import pytest
from conftest import accelerate_launch, slow, together, write_recipe

from finetune.distributed.gloo_shared_memory import SLOT, SLOTS
from finetune.runs.run import Run

MEETING = """
import random, resource, sys, time
import torch, torch.distributed as dist
from torch.distributed import ReduceOp
from finetune.distributed.gloo_shared_memory import SLOT, AllGather, Boxes, ReduceScatter
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""

EXCHANGES = (
    MEETING
    + """
boxes = Boxes.shared()
assert not isinstance(boxes, str), boxes
gather, scatters = AllGather(boxes), [ReduceScatter(boxes), ReduceScatter(None)]
uneven = random.Random(rank)  # ranks come early and late, each for itself

def values(count, owner, seed, kind):
    made = torch.Generator().manual_seed(1_000 * seed + owner)
    return torch.randn(count, generator=made).to(kind)

def empty(count, kind):
    return gather.allocate((count,), dtype=kind, device=torch.device("cpu"))

for seed, (length, kind) in enumerate([
    (1, torch.float32), (7, torch.bfloat16), (SLOT // 4 // world, torch.float32),
    (SLOT // 4 // world + 1, torch.float32), (2 * SLOT + 3, torch.bfloat16),
    *[(5, torch.float32)] * 20,
]):
    parts = [values(length, owner, seed, kind) for owner in range(world)]
    output = empty(world * length, kind)
    place = output[rank * length : (rank + 1) * length]
    time.sleep(uneven.random() / 50)
    if seed % 2:  # as FSDP2 does: the input lies in the output
        place.copy_(parts[rank])
        gather(output, place, dist.group.WORLD)
    else:
        gather(output, parts[rank], dist.group.WORLD)
    assert torch.equal(output, torch.cat(parts)), (seed, length, kind)

    wholes = [values(world * length, owner, seed + 500, kind) for owner in range(world)]
    rows = [whole.view(world, length)[rank] for whole in wholes]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    for op, expected in ((ReduceOp.SUM, total), (ReduceOp.AVG, total / world)):
        for scatter in scatters:
            result = empty(length, kind)
            time.sleep(uneven.random() / 50)
            scatter(result, wholes[rank], dist.group.WORLD, op)
            assert torch.equal(result, expected), (seed, length, kind, op)
    if world == 2 and kind == torch.float32:
        dist.reduce_scatter_tensor(result, wholes[rank], op=ReduceOp.SUM)
        assert torch.equal(result, total), (seed, length)
print("alike")
"""
)

REFUSAL = (
    MEETING
    + """
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
print(Boxes.shared())
"""
)

LIMITED = f"""
import resource
from finetune.cli import run
resource.setrlimit(resource.RLIMIT_FSIZE, ({SLOTS * SLOT - 1}, {SLOTS * SLOT - 1}))
run()
"""
"""The command line under a limit on the size of files, which a small run's own stay below."""


@pytest.mark.parametrize("count", [2, slow(3)])
def test_parts_of_any_size_reach_every_rank(count, tmp_path):
    assert together(EXCHANGES, count, tmp_path).passed().stdout.count("alike") == count


def test_memory_is_shared_by_all_processes_or_none(tmp_path):
    told = together(REFUSAL, 2, tmp_path).passed().stdout
    assert told.count("no memory can be shared: File too large") == 2


def test_a_run_over_gloo_reports_it_and_has_the_same_digits(tiny, finetune, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields(max_steps=3))
    words = ("--backend", "fsdp_full_shard", "--processes", "2", "--precision", "fp32")
    shared = finetune("launch", recipe, *words, "--output", tmp_path / "shared")
    (tmp_path / "limited.py").write_text(LIMITED)
    alone = accelerate_launch(
        "fsdp_full_shard", tmp_path, "--num_processes", "2", tmp_path / "limited.py",
        "train", recipe, "--output", tmp_path / "gloo", "--no-plot",
    )  # fmt: skip
    assert (shared.status, alone.status) == (0, 0), shared.output + alone.output
    told = "FSDP's weights and gradients go over gloo, because no memory can be shared"
    assert told in alone.output
    assert told not in shared.output
    found = [
        [(step["loss"], step["grad_norm"]) for step in Run(tmp_path / name).read_metrics("train")]
        for name in ("shared", "gloo")
    ]
    assert len(found[0]) == 3
    assert found[0] == found[1]
