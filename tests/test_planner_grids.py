"""Tensor and pipeline parallel as arithmetic, and `ft.plan` on a machine in words."""

import pytest
from planning import BASE

import finetune as ft
from finetune.planner.estimate import hardware
from finetune.planner.estimate.grids import plan_grid
from finetune.planner.estimate.parallelism import Grid
from finetune.planner.shapes.read_config import read

SHAPE = read(BASE)
RECIPE = ft.SFT(
    ft.Model(config=BASE, tokenizer="/none", activation_checkpointing=True),
    (ft.Data("rows.jsonl", "messages"),),
).with_batch(rows=64, micro_rows=2, max_length=1024)
MACHINE = hardware.machine("H100-80", 16, 2)


def test_a_grid_holds_its_share_and_waits_for_its_pipeline():
    found = plan_grid(RECIPE, MACHINE, tensor=2, pipeline=2)
    assert found.grid == Grid(2, 2, 4)
    assert found.microbatches == 64 // (4 * 2)
    assert found.bubble == 1 / (8 + 1)
    layers = -(-SHAPE.layers // 2)  # of the first stage
    stage = layers * SHAPE.layer_parameters + SHAPE.outer_parameters / 2
    assert found.memory.states == stage / 2 * (2 + 2 + 12 / 4)  # the optimizer over 4
    kept = 2 * 1024 * SHAPE.hidden * 4  # what enters a block, in the fp32 of its weights
    assert found.memory.activations == layers * 2 * kept / 2  # of two micro-batches, over two
    assert found.fits == (found.memory.total <= MACHINE.usable)
    alone = plan_grid(RECIPE, MACHINE, tensor=1, pipeline=1)
    assert found.compute == pytest.approx(alone.compute / (1 - found.bubble))


@pytest.mark.parametrize(
    ("recipe", "tensor", "pipeline", "told"),
    [
        (RECIPE, 16, 1, "tensor parallel over 16 GPUs, but a node has 8"),
        (RECIPE, 1, 3, "1 x 3 x 5 = 15, but there are 16 GPUs"),
        (RECIPE, 0, 1, "--tensor 0, --pipeline 1: expected whole numbers of at least 1"),
        (RECIPE.with_lora(), 2, 1, "the recipe trains an adapter; use adapter=null"),
        (
            RECIPE.with_batch(rows=12), 1, 1,
            "12 rows do not divide into 16 data parallel groups x micro-batches of 2; use a "
            "multiple of 32",
        ),
    ],
)  # fmt: skip
def test_an_impossible_grid_is_refused_with_its_numbers(recipe, tensor, pipeline, told):
    with pytest.raises(ft.FinetuneError) as caught:
        plan_grid(recipe, MACHINE, tensor, pipeline)
    assert told in str(caught.value)


def test_the_command_prints_a_grid_marked_as_arithmetic(finetune):
    words = "plan llama3_3_70b_full --tensor 8 --pipeline 2".split()
    done = finetune(*words, *"--gpu H100-80 --gpus 64 --nodes 8".split())
    assert done.status == 0, done.output
    assert done.stdout.startswith("TP8 x PP2 x DP4 on 64 x H100-80 in 8 nodes: fits")
    assert "bubble   3.0% of a step: 2 stages, 32 micro-batches each" in done.stdout
    assert "arithmetic of a layout" in done.stdout
    without = finetune(*words)
    assert without.status == 2
    assert "the backends with one are pp, pp_fsdp, pp_tp, pp_tp_fsdp" in without.stderr


def test_plan_in_python_is_the_plan_or_what_it_takes_on_a_machine():
    settled = ft.plan(RECIPE, "fsdp_full_shard", 2)
    assert settled.processes == 2
    found = ft.plan(RECIPE, "fsdp_full_shard", gpu="H100-80", gpus=16, nodes=2, rows=640)
    assert found.plan == ft.plan(RECIPE, "fsdp_full_shard", 16)
    assert (found.machine, found.steps) == (MACHINE, 10)
    assert found.page().startswith("fsdp_full_shard on 16 x H100-80 in 2 nodes: fits")
    described = ft.plan(RECIPE, "single", gpu_memory=24, tflops=100, bandwidth=900)
    assert described.machine.gpu.memory == 24e9
    with pytest.raises(ft.FinetuneError, match="did you mean 'RTX4090'"):
        ft.plan(RECIPE, "single", gpu="RTX4900")
