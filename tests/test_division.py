"""Models divided over processes: the same numbers as one process, and what is refused."""

import dataclasses
import json
import re
from typing import Any

import divided
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from conftest import (
    accelerate_launch,
    copy_of,
    cut_off,
    launch,
    problems_of,
    read,
    slow,
    write_recipe,
)
from safetensors.torch import load_file
from torch.autograd.profiler_util import FunctionEvent
from transformers.distributed import mixin

import finetune as ft
from finetune import backend as backends
from finetune.backend import megatron
from finetune.backend.axes import Axes
from finetune.data.rows.collate import Boundaries, MicroBatch
from finetune.distributed import layers
from finetune.distributed.context import attention_of_part
from finetune.distributed.filling import padded
from finetune.distributed.pipeline import PASS
from finetune.models.packed_attention import attend
from finetune.planner import schedules
from finetune.planner.estimate import memory, traffic
from finetune.planner.mesh import Mesh
from finetune.reports import drawings
from finetune.training import rank_profiles
from finetune.verification.memory.plan_and_trace import extrapolate
from finetune.verification.proofs.checks import compare_steps
from finetune.verification.proofs.matrix import BF16
from finetune.verification.proofs.runs import steps_of

ADAPTER = {"r": 4, "targets": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "packed": {"batch": {"packing": True}},
    "lora": {"adapter": ADAPTER},
    "dora": {"adapter": ADAPTER | {"use_dora": True}},
}


@pytest.fixture(scope="module")
def sections(tiny, shared) -> dict[str, Any]:
    return divided.qwen(tiny, shared)


@pytest.fixture(scope="module")
def alone(run_of, sections) -> ft.Run:
    return run_of(**sections)


@pytest.fixture(scope="module")
def tensor(alone: ft.Run, tmp_path_factory: pytest.TempPathFactory) -> ft.Run:
    """Tensor parallel by plain `accelerate launch`, which knows nothing of this project."""
    run = ft.Run(tmp_path_factory.mktemp("tensor") / "run")
    words = ("-m", "finetune", "train", alone.recipe, "--output", run.root, "--no-plot")
    accelerate_launch("tp", run.root.parent, *words).passed()
    return run


def test_tensor_parallel_learns_what_one_process_learns(alone, tensor):
    """Accumulation 4 and q/k norms: transformers 5.23 alone has the norm wrong by 6e-3."""
    divided.assert_equal(alone, tensor)
    divided.assert_planned(tensor)
    held, (whole,) = divided.parameters_held(tensor), divided.parameters_held(alone)
    assert len(held) == 2
    assert max(held) < 0.52 * whole  # norms are on both
    assert divided.weights_written(tensor) == whole
    assert "distributed_config" not in read(tensor.final / "config.json")


@pytest.fixture(scope="module")
def pipelined(tensor, finetune) -> ft.Run:
    """A pipeline that goes on from the middle of tensor parallel."""
    run = cut_off(tensor, tensor.root.parent / "pipelined", divided.MIDDLE)
    launch(finetune, tensor.recipe, "pp", run.root, "--resume")
    return run


def test_a_pipeline_goes_on_from_tensor_parallel(alone, pipelined):
    """Five layers in two stages, a tied table on both; its result is a plain model."""
    divided.assert_equal(alone, pipelined)
    divided.assert_planned(pipelined)
    divided.assert_same_logits(alone, pipelined)


def test_the_page_of_a_run_draws_its_plan_beside_what_was_measured(pipelined, alone, tmp_path):
    page, settled = ft.report(pipelined).read_text(), read(pipelined.plan)
    counted = list(pipelined.read_metrics("memory"))[-1]
    assert re.findall(r"<title>(rank [^<]*)<", page) == ["rank 0: pipeline 0", "rank 1: pipeline 1"]
    assert re.findall(r">layers ([^<]*)<", page) == ["0 to 2", "3 to 4"]
    sent = settled["prediction"]["sent"]["pipeline"]
    assert f">{drawings.size(sent)}<" in page
    # A stage's bar is made of the parts of its planned peak, and ends beside its mark.
    drawn = re.findall(r">([^<]*), measured ([^<]*?) *<", page)
    pairs = zip(counted["planned"], counted["peaks"], strict=True)
    assert drawn == [tuple(map(drawings.size, pair)) for pair in pairs]
    sums = [round(sum(parts.values())) for parts in counted["parts"]]
    assert sums == pytest.approx(counted["planned"], abs=len(drawings.PARTS))
    assert page.count('class="measured"') == 2
    # One task for each pass of a micro-batch, in the schedule of the plan.
    for name in ("forward", "backward"):
        for stage in range(2):
            found = re.findall(rf">{name} pass, micro-batch (\d), part {stage}<", page)
            assert found == [str(each) for each in range(settled["accumulation"])]
    assert f"1F1B: a stage waits {settled['bubble']:.1%} of a step" in page
    assert "Who held what" not in ft.report(copy_of(alone, tmp_path / "alone")).read_text()


@pytest.mark.parametrize(
    ("backend", "place"),
    [("pp", "pipeline 1"), slow("tp", "tensor 1")],
)
def test_a_refusal_on_one_rank_is_said_once_with_its_place(backend, place, tiny, tmp_path):
    """The others would wait for a rank that has left; under `tp`, while PEFT adapts a layer."""
    script = tmp_path / "launch.py"
    script.write_text(ONE_RANK_REFUSES)
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields(adapter={"r": 4}))
    words = ("train", recipe, "--output", tmp_path / "run", "--no-plot", "--timeout", "2")
    sizes = backends.load(backend).axes.variables()
    done = accelerate_launch(backend, tmp_path, script, *words, env=sizes)
    assert done.status != 0
    assert f"rank 1 ({place}): model.name: the head is not what it was" in done.stderr


ONE_RANK_REFUSES = """
from finetune.cli import run
from finetune.errors import FinetuneError
from finetune.models import model

build = model.build

def refuse(engine, seed):
    if engine.rank == 1:
        raise FinetuneError("model.name: the head is not what it was")
    return build(engine, seed)

model.build = refuse
run()
"""

ROTATED = ("--rotation", "alltoall")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "changes", "words"),
    [
        ("lora", "tp_fsdp", {"adapter": ADAPTER | {"exclude_modules": ["q_proj"]}}, ()),
        ("packed", "sp_tp", {}, ()),
        ("packed", "cp", {}, (*ROTATED, "--context", "4")),
        ("lora", "cp", {"batch": {"packing": True}}, ROTATED),
        ("full", "pp", {"max_steps": 4}, ("--schedule", "Interleaved1F1B", "--profile")),
        ("full", "pp_tp_fsdp", {"batch": {"rows": 16}}, ()),
        # DoRA on complete layers: a stage has some, and FSDP2 gathers those of split rows.
        ("dora", "pp", {}, ()),
        ("dora", "sp", {}, ()),
    ],
)
def test_every_division_learns_what_one_process_learns(
    name, backend, changes, words, run_of, sections
):
    given = sections | KINDS[name] | changes
    count = 4 if "--context" in words else divided.processes_of(backend)
    alone, run = run_of(**given), run_of(backend, *words, processes=count, **given)
    divided.assert_equal(alone, run, given["max_steps"])
    divided.assert_planned(run)
    if name == "lora":  # plain PEFT finds the layers of all stages
        named = tuple(read(run.final / "adapter_config.json")["target_modules"])
        for key in load_file(run.final / "adapter_model.safetensors"):
            assert key.partition(".lora_")[0].endswith(named), key
    if "--profile" in words:
        assert_profiled(run)


def assert_profiled(run: ft.Run) -> None:
    """Each rank has a trace with the passes of its parts, and its times beside those of others."""
    count = read(run.plan)["accumulation"]
    for rank in range(2):
        events = read(run.profile / f"trace-rank-{rank:05d}.json")["traceEvents"]
        assert {each["name"] for each in events if str(each.get("name")).startswith(PASS)} == {
            f"{PASS} {part} {kind} {micro}"
            for part in (rank, rank + 2)
            for kind in ("forward", "backward")
            for micro in range(count)
        }
    ranks = read(run.profile / "ranks.json")
    assert all(0 < each["passes"] < each["pipeline"] < each["step"] for each in ranks)
    assert all(each["waits"] == each["step"] - each["computes"] for each in ranks)


@pytest.mark.slow
def test_a_sharded_pipeline_hands_on_what_it_computes_in_bf16(run_of, sections):
    alone, run = (
        run_of(backend, "--precision", "bf16", processes=divided.processes_of(backend), **sections)
        for backend in ("single", "pp_fsdp")
    )
    found = (steps_of(each.metrics) for each in (alone, run))
    wrong, _ = compare_steps(*found, range(1, divided.STEPS + 1), BF16)
    assert wrong == []
    divided.assert_planned(run)


@pytest.mark.slow
def test_the_plan_and_a_trace_count_the_bytes_of_each_axis(sections, tmp_path):
    """Every collective of a step on four processes, by the ranks of its group."""
    counts, workload, traced = divided.counted_step(sections["model"]["name"], "pp_tp", 8, tmp_path)
    for rank, counted in enumerate(counts):
        assert counted["tokens"] == 2 * 48
        found = dict(traced.each[rank // 2].traced.payload)
        if rank > 1:  # every token of a row is labelled in a trace, the first of no real row
            found["tensor all_gather"] *= 47 / 48
            found["tensor all_reduce"] -= 4 * 2 * 64 * 4
        by_axis = {
            f"{axis} {kind.replace('-', '_')}": size
            for axis in ("tensor", "pipeline")
            for kind, size in counted[axis].items()
        }
        assert by_axis == pytest.approx(found, abs=0.5)
        here = memory.at_stage(workload, rank // 2)
        for axis, kinds in traffic.payloads(here).items():
            for kind, size in kinds.items():
                assert counted[axis][kind] == pytest.approx(size, rel=0.05), (rank, axis, kind)


@pytest.mark.parametrize(("least", "counts"), [(100, False), (1_000, True)])
def test_only_moments_that_may_be_the_peak_must_be_linear(least, counts):
    """A moment with 10 bytes more than its line predicts, far below the peak and near it."""

    def step(layers: int, more: int) -> dict[str, Any]:
        peaks = {
            "embedding": {"a": 1_000 + 100 * layers},
            "layer": {"a": least + 100 * layers + more},
        }
        return {
            "layers": layers, "parameters": 0, "trained": 0, "held": {}, "gradients": 0,
            "saved": 0, "peaks": peaks, "collectives": {},
        }  # fmt: skip

    steps: Any = [step(2, 0), step(3, 0), step(4, 10)]
    found = extrapolate(steps, 8, 4, offload=False)
    assert (found.deviation, found.peak[1]) == (pytest.approx(10 / 1_400 if counts else 0.0), 1_800)


def test_a_transformers_that_divides_otherwise_is_named(monkeypatch):
    """5.17 has no such name; its loader would fail in the middle of a model."""
    monkeypatch.delattr(mixin, "initialize_distributed_mesh")
    meshes: Any = None
    with (
        pytest.raises(ft.FinetuneError, match=r"mixin has no initialize_distributed_mesh, which"),
        layers.dividing(meshes, torch.device("cpu"), Axes(tensor=2)),
    ):
        pass


@pytest.mark.parametrize(
    ("backend", "change", "problem"),
    [
        ("tp", {"dropout": 0.1}, "adapter.dropout: several processes would drop different"),
        ("cp", {"dropout": 0.1}, "adapter.dropout: several processes would drop different"),
        ("pp_tp", {"use_dora": True}, "adapter.use_dora: DoRA needs the norm of complete rows"),
        ("pp", {"modules_to_save": ("lm_head",)}, "adapter.modules_to_save: copies of modules"),
        ("sp", {"init_lora_weights": "pissa"}, "'pissa' reads complete base weights"),
        ("pp", {}, ""),
        ("cp", {}, ""),
        ("pp", {"use_dora": True}, ""),
        ("sp", {"use_dora": True}, ""),
    ],
)
def test_an_adapter_that_does_not_divide_is_refused(backend, change, problem):
    recipe = divided.BASE.with_lora(**({"dropout": 0.0} | change)).with_batch(rows=16, micro_rows=1)
    divided.assert_refused(divided.reasons(recipe, backend), problem)


@pytest.mark.parametrize(
    ("method", "backend", "problem"),
    [
        (ft.Classifier(labels=("a", "b")), "pp", "needs a score head"),
        (ft.RewardModel(), "pp_tp", "needs a score head"),
        (ft.RewardModel(), "tp", ""),
        (ft.KTO(), "pp", ""),
        (ft.KTO(), "cp", ""),
        (ft.RewardModel(), "sp_tp", ""),
    ],
)
def test_a_method_that_does_not_divide_is_refused(method, backend, problem):
    batch = ft.Batch(rows=16, micro_rows=1)
    recipe = dataclasses.replace(
        method, model=divided.BASE.model, data=divided.BASE.data, batch=batch
    )
    found = [each for each in divided.reasons(recipe, backend) if each.startswith("method: ")]
    divided.assert_refused(found, problem)


@pytest.mark.parametrize(
    ("backend", "fields", "sizes", "problem"),
    [
        ("tp", {}, {}, ""),
        ("pp", {}, {"pipeline": 6}, ""),
        ("pp_tp_fsdp", {}, {"pipeline": 3}, ""),
        ("tp", {}, {"tensor": 4}, "6 attention heads do not divide over 4 processes; use 2 or 3"),
        ("tp", {}, {"tensor": 3}, "2 key heads do not divide over 3 processes; use 2"),
        ("tp", {"model_type": "phi3"}, {}, "tensor parallelism of phi3 is not supported"),
        ("tp", {"use_qk_norm": True}, {}, "norm with separate weights for each head"),
        ("tp", {"attention_dropout": 0.1}, {}, "attention_dropout=0.1 draws different"),
        ("pp", {}, {"pipeline": 7}, "6 layers do not fill 7 stages"),
        ("pp", {"model_type": "granite"}, {}, "parallelism of granite is not supported"),
        ("cp", {"model_type": "gemma2"}, {}, "context parallelism of gemma2 is not"),
        ("cp", {"sliding_window": 64}, {}, "sliding_window=64, but the keys of all previous"),
        ("cp", {"head_dim": 12}, {"rotation": "alltoall"}, "heads of 12, but the kernels of ring"),
        ("sp_tp", {}, {}, "3 attention heads of a tensor parallel process do not divide over 2"),
        ("sp", {}, {"sequence": 4}, "6 attention heads do not divide over 4 processes; use 2 or 3"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(backend, fields, sizes, problem):
    divided.assert_named(divided.refused(backend, fields, sizes), problem)


@pytest.mark.parametrize(
    ("backend", "processes", "problem"),
    [
        ("tp", 4, "tp with tensor 2 runs 2, got 4; use tp_fsdp"),
        ("tp_fsdp", 2, "leaves 1 of 2 processes to shard over; use tp"),
    ],
)
def test_sizes_multiply_to_the_processes(backend, processes, problem):
    found = divided.reasons(divided.BASE.with_batch(rows=16, micro_rows=1), backend, processes)
    assert problem in "; ".join(found)


@pytest.mark.parametrize(
    ("backend", "sizes", "problem"),
    [
        ("pp", {"tensor": 2}, "--tensor 2: pp has no such axis; the backends with"),
        ("tp", {"tensor": 1}, "--tensor 1: expected at least 2"),
        ("sp", {"rotation": "alltoall"}, r"--rotation alltoall: sp has no such axis; .* are cp$"),
    ],
)
def test_an_axis_that_a_backend_lacks_is_refused(backend, sizes, problem):
    with pytest.raises(ft.FinetuneError, match=problem):
        backends.divided(backends.load(backend), None, sizes)


def test_megatron_lm_is_refused_by_name_and_at_launch(monkeypatch):
    """Accelerate's launcher sets this variable, and its flags would otherwise train as DDP."""
    with pytest.raises(ft.FinetuneError, match="backend megatron: Megatron-LM has no backend here"):
        backends.load("megatron")
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    (told,) = problems_of(backends.launched)
    assert "--use_megatron_lm: Megatron-LM has no backend here" in told


@pytest.mark.parametrize(
    ("processes", "section", "problems"),
    [
        (4, {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2,
             "megatron_lm_num_micro_batches": 8}, ["use --backend pp_tp --pipeline 2 --tensor 2"]),
        (16, {"megatron_lm_tp_degree": 8}, ["use --backend tp_fsdp --tensor 8"]),
        (2, {"megatron_lm_context_parallel_size": 2}, ["use --backend cp --context 2"]),
        (4, {"tp_degree": 2, "megatron_lm_gradient_cliping": 1.0},
         ["megatron_lm_config.tp_degree: unknown key, which Accelerate ignores; did you mean "
          "'megatron_lm_tp_degree'?", "did you mean 'megatron_lm_gradient_clipping'?",
          megatron.INSTEAD]),
        (6, {"megatron_lm_tp_degree": 4},
         ["num_processes: 6 is not a multiple of the 4 processes", megatron.INSTEAD]),
        (4, {"megatron_lm_tp_degree": "2"}, ["got '2', expected a whole number", megatron.INSTEAD]),
        (4, {"megatron_lm_pp_degree": 4, "megatron_lm_num_micro_batches": 2},
         ["num_micro_batches: 2 for 4 stages leaves stages without work", megatron.INSTEAD]),
    ],
)  # fmt: skip
def test_a_file_for_megatron_lm_is_checked_and_translated(processes, section, problems, tmp_path):
    """Accelerate ignores a misspelt key, and trains with one process for each layer."""
    lines = [f"  {key}: {json.dumps(value)}" for key, value in section.items()]
    head = ["distributed_type: MEGATRON_LM", f"num_processes: {processes}", "megatron_lm_config:"]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([*head, *lines]) + "\n")
    found = problems_of(backends.load, str(path))
    assert all(problem in each for problem, each in zip(problems, found, strict=True))
    assert megatron.REASON in found[-1]


def test_the_known_keys_of_megatron_lm_are_those_that_accelerate_reads():
    words = {option.lstrip("-") for option in launch_command_parser()._option_string_actions}
    assert {word for word in words if word.startswith(megatron.PREFIX)} == megatron.KEYS


@pytest.mark.parametrize("ways", [1, 2, 3, 6])
def test_a_part_of_a_row_sees_what_it_sees_in_the_whole(ways):
    """Documents that lie within a part, and ones that began on another process."""
    made = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 12, 8, generator=made) for heads in (4, 2, 2))
    ends = (0, 3, 8, 11, 12)
    whole, _ = attend(
        torch.nn.Identity(), query, key, value, None, max_length_q=5, document_ends=ends,
        cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32),
    )  # fmt: skip
    parts = query.split(12 // ways, dim=2)
    found = [
        attention_of_part(part, key, value, rank * 12 // ways, ends)
        for rank, part in enumerate(parts)
    ]
    assert torch.allclose(torch.cat(found, dim=2).transpose(1, 2), whole, atol=1e-6)


def test_ranks_lie_along_the_axes():
    machine, count = backends.divided(backends.load("tp_fsdp"), None, {"tensor": 4})
    assert (machine.axes.tensor, count) == (4, 8)
    mesh = Mesh(pipeline=2, replicate=1, shard=2, tensor=2)
    assert mesh.processes == 8
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.place(6) == {"pipeline": 1, "replicate": 0, "shard": 1, "sequence": 0, "tensor": 0}
    assert (mesh.where(5), Mesh().where(0)) == ("pipeline 1, shard 0, tensor 1", "")


def test_stages_have_all_layers_once():
    two = Axes(pipeline=2)
    assert schedules.spans(5, two) == [range(0, 3), range(3, 5)]
    assert [schedules.parts_of(stage, two) for stage in range(2)] == [[0], [1]]
    ring, v = (Axes(pipeline=2, schedule=s) for s in ("Interleaved1F1B", "ZBVZeroBubble"))
    assert schedules.spans(5, ring) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert [schedules.parts_of(stage, ring) for stage in range(2)] == [[0, 2], [1, 3]]
    assert [schedules.parts_of(stage, v) for stage in range(2)] == [[0, 3], [1, 2]]


def test_micro_batches_of_a_pipeline_have_one_shape_and_the_same_labels():
    def documents(*lengths: int) -> MicroBatch:
        ids = torch.arange(sum(lengths))[None]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        positions = torch.cat([torch.arange(each) for each in lengths])[None]
        bounds = Boundaries(positions, ends, max(lengths), tuple(ends.tolist()))
        return MicroBatch(ids, ids.clone(), None, len(lengths), sum(lengths), sum(lengths), bounds)

    short, long = padded([documents(2, 1), documents(4, 3)], pad_id=9)
    assert short.ids.tolist() == [[0, 1, 2, 9, 9, 9, 9]]
    assert short.labels.tolist() == [[0, 1, 2, -100, -100, -100, -100]]
    assert short.boundaries.ends.tolist() == [*short.boundaries.numbers] == [0, 2, 3, 7]
    assert short.boundaries.positions.tolist() == [[0, 1, 0, 0, 1, 2, 3]]
    assert short.boundaries.longest == 4
    assert (short.trained_tokens, short.real_tokens) == (3, 3)
    assert long.ids.shape == (1, 7)
    assert padded([], pad_id=9) == []


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_ranks_that_keep_to_the_schedule_wait_as_the_formula_says(schedule):
    """The passes of a profile as the plan times them: a stage of two parts has shorter ones."""
    axes, mesh = Axes(pipeline=2, schedule=schedule), Mesh(pipeline=2, tensor=2)
    found: list[rank_profiles.Shares] = []
    for line in schedules.timed(axes, 4):
        passes = [
            FunctionEvent(0, f"{PASS} {slot.task}", 0, slot.start * 1e6, slot.end * 1e6)
            for slot in line
        ]
        exchanged = [(0.0, 2e6), (1e6, 3e6)]
        mine = rank_profiles.shares(passes, 40.0, 30.0 - len(found), exchanged, cuda=False)
        found += [mine, dataclasses.replace(mine, computes=mine.computes - 5)]
    assert rank_profiles.bubble(found) == pytest.approx(schedules.bubble(axes, 4))
    assert {each.exchanges for each in found} == {3.0}
    told = rank_profiles.table(found, mesh, schedules.bubble(axes, 4))
    assert told[2].split() == ["1", "pipeline", "0,", "tensor", "1", "25.000", "s", "3.000", "s",
                               "15.000", "s"]  # fmt: skip
    assert told[-2] == (
        "slowest: rank 0 (pipeline 0, tensor 0) computes 30.000 s, the fastest 23.000 s"
    )
    share = f"{schedules.bubble(axes, 4):.1%}"
    assert told[-1] == (
        f"pipeline: a stage runs no pass in {share} of the time, by the formula {share}"
    )
