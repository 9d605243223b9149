"""Wrong sizes of axes, in files, on command lines and in processes: each is refused once."""

import dataclasses
import datetime
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import problems_of
from divided import LLAMA as SMALL
from divided import write_config
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import finetune as ft
from finetune import backend as backends
from finetune.backend.axes import Axes, product_problem
from finetune.checks.request import check_here
from finetune.distributed.pipeline import MarkedStage
from finetune.launchers import accelerate
from finetune.launchers.job import Job
from finetune.planner import Plan, plan
from finetune.planner.estimate import hardware
from finetune.planner.estimate.forecast import Facts, forecast
from finetune.process import rendezvous
from finetune.training.out_of_memory import out_of_memory

SECTION = "parallelism_config"
KEY, SIZE = f"{SECTION}.{SECTION}", f"{SECTION}_tp_size: 2"
LLAMA: dict[str, Any] = SMALL | {
    "num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320,
}  # fmt: skip
RECIPE = (
    ft.SFT(model=ft.Model(config=LLAMA, tokenizer="x"))
    .with_data(ft.Data("rows.jsonl", "messages"))
    .with_batch(rows=8, micro_rows=2, max_length=64)
)

WHOLE = "expected a whole number of at least 1"
SCHEDULES = "expected one of GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        *(
            ("tp_size: 2", f"tp_size: {new}", f"{KEY}_tp_size: got {got}, {WHOLE}")
            for new, got in (("0", "0"), ("-2", "-2"), ("1.5", "1.5"), ("two", "'two'"), ("", None))
        ),
        (SIZE, "tp_size: 2", f"{SECTION}.tp_size: unknown key; did you mean '{SECTION}_tp_size'?"),
        (
            SIZE, f"{SECTION}_pp_size: 2\n  {SECTION}_pp_schedule: 1f1b",
            f"{KEY}_pp_schedule: got '1f1b', {SCHEDULES}; did you mean '1F1B'?",
        ),
        (
            SIZE, f"{SECTION}_cp_size: 2\n  {SECTION}_cp_comm_strategy: all_to_all",
            f"{KEY}_cp_comm_strategy: got 'all_to_all', expected one of allgather, alltoall; did "
            "you mean 'alltoall'?",
        ),
        (
            SIZE, f"{SIZE}\n  {SECTION}_cp_comm_strategy: alltoall",
            f"{KEY}_cp_comm_strategy: got 'alltoall' without context parallelism; remove it, or "
            f"set {SECTION}_cp_size",
        ),
        (
            SIZE, f"{SECTION}_tp_size: 4\n  {SECTION}_dp_shard_size: 2",
            f"{SECTION}: dp_shard 2 x tp 4 = 8 processes, but num_processes is 2; use "
            "num_processes: 8, or sizes whose product is 2",
        ),
        ("num_processes: 2", "num_processes: two", f"num_processes: got 'two', {WHOLE}"),
        (
            "MULTI_GPU", "MULTI_CPU",  # Accelerate would start one process and give it no sizes
            "distributed_type: got 'MULTI_CPU', expected MULTI_GPU (also on CPUs) with axes that "
            "divide the model; parallelism_config_dp_shard_size shards it with FSDP2",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_in_a_file_is_one_problem(old, new, problem, tmp_path):
    """Accelerate takes most of these, and trains data parallel without a word."""
    path = write_config(tmp_path / "mine.yaml", "tp", (old, new))
    assert problems_of(backends.load, str(path)) == (f"{path}: {problem}",)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("TP_SIZE", "two", f"got 'two', {WHOLE}"),
        ("PP_SIZE", "1.5", f"got '1.5', {WHOLE}"),
        ("DP_SHARD_SIZE", "0", f"got '0', {WHOLE}"),
        ("CP_COMM_STRATEGY", "ring", "got 'ring', expected one of allgather, alltoall"),
        ("PP_SCHEDULE", "gpipe", f"got 'gpipe', {SCHEDULES}; did you mean 'GPipe'?"),
    ],
)
def test_a_wrong_variable_of_a_process_is_refused(variable, value, problem):
    """torch finds a schedule in any case, and the plan counts in-flight micro-batches by name."""
    name = f"PARALLELISM_CONFIG_{variable}"
    given = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
    with pytest.raises(ft.FinetuneError, match=re.escape(f"{name}: {problem}")):
        backends.from_environment(given | {name: value})


@pytest.mark.parametrize(
    ("axes", "shard", "started", "instead"),
    [
        (Axes(tensor=2), 1, 3, "start 2 or 4"),
        (Axes(pipeline=2, tensor=2), 2, 3, "start 4"),
        (Axes(), 1, 2, "Accelerate drops the sizes of pp and ep, which are read from the file if"),
        (Axes(tensor=2), 4, 4, "give --parallelism_config_dp_replicate_size and --parallelism_"),
        (Axes(tensor=2), 2, 4, None),
    ],
)
def test_sizes_that_do_not_fit_the_processes_say_what_does(axes, shard, started, instead):
    problem = product_problem(axes, 1, shard, started)
    assert (problem is None) == (instead is None)
    assert problem is None or f", but {started} were started; {instead}" in problem


@pytest.mark.parametrize(
    ("backend", "processes", "sizes", "rows", "problem"),
    [
        ("tp", 3, {}, 8, "processes: 3 are not a multiple of tensor 2 (2 processes); use 2 or 4"),
        (
            "pp", None, {"pipeline": 7}, 14,
            "--pipeline 7: 6 layers do not fill 7 stages; use at most 6 stages",
        ),
        (
            "pp", None, {"pipeline": 4, "schedule": "Interleaved1F1B"}, 8,
            "--pipeline 4: 6 layers do not fill 4 stages x 2 parts (Interleaved1F1B); use at most "
            "3 stages",
        ),
        (
            "pp", None, {}, 2,
            "batch.rows: 1 micro-batch per step for 2 stages, which leaves stages without work; "
            "use batch.rows=4",
        ),
        (
            "pp", None, {"schedule": "Interleaved1F1B"}, 6,
            "batch.rows: 3 micro-batches do not divide into rounds of 2 for Interleaved1F1B; use "
            "a multiple of 4 rows, or 1F1B",
        ),
        (
            "tp", None, {}, 7,
            "batch.rows: 7 does not divide into micro-batches of 2 rows on 1 group of processes "
            "(2 x 1 = 2); use batch.rows=6 or 8",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_one_problem_with_what_does(
    backend, processes, sizes, rows, problem
):
    machine, count = backends.divided(backends.load(backend), processes, sizes)
    assert problems_of(plan, RECIPE.with_batch(rows=rows), machine, count) == (problem,)


def test_a_config_without_a_type_is_one_problem():
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    recipe = dataclasses.replace(RECIPE, model=ft.Model(config=config, tokenizer="x"))
    told = "model.config: `model_type` is missing (llama, qwen3, mistral, ...)"
    assert problems_of(plan, recipe, "pp_tp") == (told,)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Variables of a process of two, with sizes of axes."""

    def give(sizes: dict[str, str]) -> None:
        for name in [each for each in os.environ if each.startswith("PARALLELISM_CONFIG")]:
            monkeypatch.delenv(name)
        given = {
            "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "WORLD_SIZE": "2", "RANK": "0",
        }  # fmt: skip
        for name, value in (given | sizes).items():
            monkeypatch.setenv(name, value)

    return give


def test_another_backend_than_the_launched_one_is_refused(launched):
    """Sizes may differ from the file's, axes may not."""
    launched({"PARALLELISM_CONFIG_PP_SIZE": "2"})
    told = (
        r"--backend tp: accelerate launch started another one \(axes: tensor 2 != pipeline 2 \(1F"
    )
    with pytest.raises(ft.FinetuneError, match=told):
        check_here(RECIPE, "tp")


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({}, "1 copies x 1 processes, but 2 were started"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "2 processes should share one copy of the"),
    ],
)
def test_sizes_that_were_lost_on_the_way_are_refused(launched, sizes, told):
    """Stages without their axis, and shards without their engine, would train as data parallel."""
    launched(sizes)
    with pytest.raises(ft.FinetuneError, match=told):
        backends.launched()


def test_a_flag_that_contradicts_the_plan_is_refused(tmp_path):
    """It would be the last of two, and the plan would be of other processes."""
    flags = ("--num-processes", "4", "--parallelism_config_tp_size=4", "--config_file", "x.yaml")
    job = Job(plan(RECIPE, "tp"), ft.Run(tmp_path / "run"), False, None, (), flags, 0)
    assert problems_of(accelerate.run, job) == (
        "--num_processes: finetune launch sets it from the plan; use --processes N",
        "--parallelism_config_tp_size: finetune launch sets it from the plan; use --tensor N",
        "--config_file: finetune launch sets it from the plan; use --backend FILE",
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, False),
    ],
)
def test_a_wait_for_another_machine_says_how_long(given, told, monkeypatch, capsys):
    """A launcher sees only the processes of its own machine."""
    meeting = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**given, **meeting, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    rendezvous.announce_wait(datetime.timedelta(minutes=5))
    words = "rank 2 of 4: waiting for the other processes at node-0:29500, for at most 5 min"
    assert capsys.readouterr().err == (f"{words} (--timeout)\n" if told else "")


FACTS = Facts(64, False, 128, 512.0, 64.0, True, False, True, 64)


@pytest.mark.parametrize(
    ("backend", "sizes", "rank", "where", "layers"),
    [
        ("pp", {}, 0, "pipeline 0", "stage 0 of 2 holds the embedding, layers 0 to 2"),
        ("pp", {}, 1, "pipeline 1", "stage 1 of 2 holds layers 3 to 5, the head"),
        (
            "pp", {"pipeline": 3, "schedule": "Interleaved1F1B"}, 2, "pipeline 2",
            "stage 2 of 3 holds layers 2 and 5, the head",
        ),
        ("pp_tp", {}, 3, "pipeline 1, tensor 1", "stage 1 of 2 holds layers 3 to 5, the head"),
    ],
)  # fmt: skip
def test_a_stage_that_runs_out_of_memory_is_named_with_its_layers_and_what_to_move(
    backend, sizes, rank, where, layers
):
    told = told_of(settled_on(backend, sizes), rank)
    at = f"step 3: out of memory on cpu of rank {rank} ({where}), which had used up to "
    assert told.startswith(at)
    assert f": Tried to allocate 2.00 GiB; {layers}; " in told
    # The first of four stages keeps four micro-batches of half as many layers: nothing is gained.
    assert (" move layers to other processes with --pipeline 4 (-" in told) == (rank in (1, 3))


def test_changes_that_a_division_refuses_are_not_suggested():
    """A head in chunks does not run under tensor parallelism."""
    told = told_of(settled_on("tp", {}), 1)
    assert "rank 1 (tensor 1)" in told
    assert "stage" not in told
    assert "batch.micro_rows=1 (-" in told
    assert "kernels.head" not in told


def settled_on(backend: str, sizes: dict[str, Any]) -> Plan:
    machine = dataclasses.replace(backends.load(backend), precision="fp32")
    machine, count = backends.divided(machine, None, sizes)
    return plan(RECIPE.with_batch(rows=12), machine, count)


def told_of(settled: Plan, rank: int) -> str:
    """The message of an error of CUDA on a rank."""
    predicted = forecast(settled, 5, FACTS, hardware.machine("H100-80", settled.processes))
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
    )
    place = torch.device("cpu")
    (told,) = out_of_memory(error, settled, rank, place, predicted, 3, "resume").problems
    return told


class Greedy(nn.Module):
    """A stage whose forward or backward pass runs out of memory."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.backward = backward

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = given * self.weight
        if not self.backward:
            raise torch.OutOfMemoryError("no room forwards")
        made.register_hook(raise_memory)
        return made


def raise_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("no room backwards")


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_in_a_pass_of_a_stage_is_raised_itself(backward, tmp_path):
    """torch raises a RuntimeError in its place, with a text that names neither type nor cause."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        meta = torch.empty(1, device="meta")
        stage = MarkedStage(
            Greedy(backward), 0, 1, torch.device("cpu"), input_args=meta, output_args=meta
        )
        schedule: Any = ScheduleGPipe(stage, 1, loss_fn=lambda made, _: made.sum())
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            schedule.step(torch.ones(1), target=torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()
