"""Layouts that divide a model, as the plan sees them: schedules, bubbles, traffic, memory."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import finetune as ft
from finetune import backend as backends
from finetune.backend.axes import SCHEDULES, Axes
from finetune.planner import plan, schedules
from finetune.planner.estimate import hardware
from finetune.planner.estimate.predict import predict
from finetune.planner.schedules import bubble, order, timed, waiting_share


def orders_of_torch(axes: Axes, count: int) -> list[list[tuple[str, int, int]]]:
    """What torch's own class runs on each stage."""
    kind: Any = torch_schedules.get_schedule_class(axes.schedule)
    made = object.__new__(kind)
    rounds = max(1, count // axes.pipeline)
    vars(made).update(
        pp_group_size=axes.pipeline, n_local_stages=axes.chunks, _n_microbatches=count,
        num_stages=axes.pipeline * axes.chunks, _num_stages=axes.pipeline * axes.chunks,
        number_of_rounds=rounds, microbatches_per_round=count // rounds,
    )  # fmt: skip
    if axes.chunks > 1:
        lines = [made._calculate_single_rank_operations(stage) for stage in range(axes.pipeline)]
    else:
        lines = list(made._get_pipeline_order().values())
    return [
        [
            (task.computation_type.value, task.stage_index, task.microbatch_index)
            for task in line
            if task is not None and task.computation_type.value in schedules.EVEN
        ]
        for line in lines
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 12), (4, 4)])
def test_stages_work_in_the_order_of_torch(schedule, stages, count):
    axes = Axes(pipeline=stages, schedule=schedule)
    ours = [
        [(task.kind, task.part, task.micro) for task in order(stage, axes, count)]
        for stage in range(stages)
    ]
    theirs = orders_of_torch(axes, count)
    # torch 2.13 numbers the forward passes of the last stage of 1F1B from 1 where it lists them.
    compared = stages - (schedule == "1F1B")
    assert (ours[:compared], len(ours[-1])) == (theirs[:compared], len(theirs[-1]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_what_the_slots_of_the_schedule_leave(schedule):
    for stages, count in ((2, 8), (4, 8), (4, 12), (8, 32)):
        axes = Axes(pipeline=stages, schedule=schedule)
        assert bubble(axes, count) == pytest.approx(waiting_share(timed(axes, count)))
        enough = schedules.enough(axes)
        assert bubble(axes, enough) < 0.1
        fewer = enough - (stages if axes.chunks > 1 else 1)
        assert fewer < stages or bubble(axes, fewer) >= 0.1


def test_bubbles_have_their_published_forms():
    def of(schedule: Any) -> float:
        return bubble(Axes(pipeline=4, schedule=schedule), 12)

    assert of("GPipe") == of("1F1B") == 3 / (12 + 3)
    assert of("Interleaved1F1B") == 3 / (2 * 12 + 3)
    # Six slots of a micro-batch on each stage, and one to reach the last.
    assert of("ZBVZeroBubble") == pytest.approx(3 / (6 * 12 + 3))


LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
    "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
GPT_175B: dict[str, Any] = LLAMA_70B | {
    "num_hidden_layers": 96, "hidden_size": 12288, "num_attention_heads": 96,
    "num_key_value_heads": 96, "intermediate_size": 32768, "vocab_size": 51200,
}  # fmt: skip


def planned(backend: str, gpus: int, sizes: dict[str, int], fields: Any, **batch: Any) -> Any:
    recipe = ft.SFT(
        ft.Model(config=fields, tokenizer="/none", activation_checkpointing=True),
        (ft.Data("rows.jsonl", "messages"),),
    ).with_batch(**batch)
    machine, _ = backends.divided(backends.load(backend), gpus, sizes)
    described = hardware.machine("H100-80", gpus, gpus // 8)
    return predict(plan(recipe, machine, gpus), described)


@pytest.mark.parametrize(
    ("fields", "gpus", "sizes", "data", "batch"),
    [
        # Llama 3.3 70B on 64 GPUs, and GPT-3's 175B on 3,072 (arXiv:2104.04473, table 1).
        (LLAMA_70B, 64, {"tensor": 8, "pipeline": 4}, 2, {"rows": 128, "max_length": 4096}),
        (GPT_175B, 3072, {"tensor": 8, "pipeline": 12}, 32, {"rows": 1536, "max_length": 2048}),
    ],
)
def test_layouts_of_the_literature_fit_as_they_are_published(fields, gpus, sizes, data, batch):
    found = planned("pp_tp_fsdp", gpus, sizes, fields, micro_rows=1, **batch)
    mesh = found.plan.mesh
    assert (mesh.tensor, mesh.pipeline, mesh.data) == (*sizes.values(), data)
    assert found.status == "safe"
    stages, count = sizes["pipeline"], batch["rows"] // data
    assert found.plan.bubble == (stages - 1) / (count + stages - 1)
    assert len(found.stages) == stages
    # Tensor parallel stays in a node; what crosses nodes is a small part of what stays.
    links = {link.axis: link for link in found.links}
    assert not links["tensor"].crosses
    assert links["pipeline"].crosses
    assert links["pipeline"].sent < links["tensor"].sent / 20


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--tensor 16 --gpu H100-80 --gpus 32", "key heads do not divide over 16 processes"),
        ("--tensor 8 --gpu H100-80 --gpus 16 --nodes 4", "over 8 GPUs, but a node has 4"),
        ("--tensor 2 --gpu RTX4090 --gpus 8", "needs NVLink between the GPUs of a node"),
    ],
)
def test_tensor_parallel_over_slow_links_is_refused(finetune, words, problem):
    told = finetune(*f"plan llama3_1_8b_full --backend tp_fsdp batch.rows=64 {words}".split())
    assert problem in told.refused()


def test_a_plan_of_a_mesh_and_its_page_show_stages_links_and_tasks(tmp_path, finetune):
    words = f"plan llama3_1_8b_full batch.rows=16 --html {tmp_path / 'plan.html'}"
    mesh = "--backend pp_tp_fsdp --tensor 2 --pipeline 4 --gpu H100-80 --gpus 16 --nodes 4"
    done = finetune(*f"{words} {mesh}".split()).passed()
    assert done.stdout.startswith("pp_tp_fsdp on 16 x H100-80 in 4 nodes: fits")
    assert "the mesh: pipeline 4 x shard 2 x tensor 2" in done.stdout
    assert "4 stages, 1F1B: a stage is idle for 27.3% of a step with 8 micro-batches" in done.stdout
    assert "sent in a step, inside a node" in done.stdout
    assert "sent in a step, between nodes" in done.stdout
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<title>rank ") == 16
    assert "rank 5: pipeline 1, shard 0, tensor 1" in page
    assert all(f"layers {8 * stage} to {8 * stage + 7}" in page for stage in range(4))
    # 8 micro-batches forwards and backwards on four stages.
    assert page.count(">forward pass, micro-batch") == 8 * 4
    assert page.count(">backward pass, micro-batch") == 8 * 4
    assert "<script" not in page
    assert "http" not in page
    assert "--html: the page is of one backend on a machine" in finetune(*words.split()).refused()
