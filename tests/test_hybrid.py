"""Hybrid sharding on four real processes: two copies of two shards, and what cannot be."""

from pathlib import Path

import pytest
from conftest import FP32, Finished, Train, accelerate_launch, apart, largest, losses, read
from divided import weights_written

import finetune as ft
from finetune import backend as backends


@pytest.fixture(scope="module")
def alone(run_of: Train) -> ft.Run:
    return run_of(adapter={"r": 4}, batch={"micro_rows": 1})


def start(alone: ft.Run, output: Path, *words: str) -> Finished:
    trained = ("-m", "finetune", "train", alone.recipe, "--output", output, "--no-plot")
    return accelerate_launch("hsdp", output.parent, *words, *trained)


@pytest.mark.slow
def test_two_copies_of_two_shards_learn_what_one_process_learns(alone, tmp_path):
    run = ft.Run(tmp_path / "run")
    start(alone, run.root).passed()
    assert apart(run, alone) <= FP32
    assert apart(run, alone, "eval") <= FP32
    assert read(run.plan)["mesh"] == {"replicate": 2, "shard": 2}
    held = read(run.realised)["ranks"]
    whole = max(rank["optimizer"] for rank in read(alone.realised)["ranks"])
    assert (len(held), sum(rank["optimizer"] for rank in held)) == (4, 2 * whole)
    assert weights_written(run, 6) == whole  # once, by one of the copies


CHANGED = """
from accelerate import ParallelismConfig
from finetune.cli import run
from finetune.distributed.fsdp import Fsdp

plugin = Fsdp.plugin

def one_copy(self, nvme_path, timeout):
    given = plugin(self, nvme_path, timeout)
    assert given["parallelism_config"].dp_replicate_size == 2
    one = ParallelismConfig(dp_replicate_size=1, dp_shard_size=4)
    return given | {"parallelism_config": one}

Fsdp.plugin = one_copy
run()
"""


@pytest.mark.slow
def test_what_accelerate_builds_is_compared(alone, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CHANGED)
    words = ("train", alone.recipe, "--output", tmp_path / "run")
    done = accelerate_launch("hsdp_shard_grad_op", tmp_path, script, *words)
    assert done.status != 0
    assert "the plan has replicate 2 x shard 2, Accelerate built shard 4" in done.stderr
    assert ft.Run(tmp_path / "run").steps() == []


def test_other_axes_that_reach_a_worker_are_refused():
    given = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true"}
    sizes = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    with pytest.raises(ft.FinetuneError, match="tensor 2 with Accelerate's FSDP: not supported"):
        backends.from_environment(given | sizes | {"WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--backend", "hsdp", "--shard-size", "1"], "a copy needs at least 2 processes"),
        (["--backend", "hsdp", "--processes", "6", "--shard-size", "4"], "do not divide into"),
        (["--backend", "ddp", "--shard-size", "2"], "ddp keeps a single copy of the model"),
        (["--backend", "hsdp", "--verify"], "--verify: only one copy of hsdp could be traced"),
    ],
)
def test_invalid_shard_sizes_are_refused(finetune, words, problem):
    assert problem in finetune("plan", "smollm2_135m_full", *words).refused()


@pytest.mark.slow
def test_a_checkpoint_of_copies_continues_anywhere_and_back(alone, tmp_path, finetune):
    for steps, backend, processes, more in (
        (2, "hsdp_shard_grad_op", 4, []),
        (4, "hsdp", 4, ["--shard-size", "4"]),
        (6, "zero2", 2, []),
    ):
        finetune(
            "launch", alone.recipe, f"max_steps={steps}", "--backend", backend, "--processes",
            processes, "--precision", "fp32", "--output", tmp_path / "run", "--resume", "auto",
            *more,
        ).passed()  # fmt: skip
    # The schedule's end moved with max_steps: only the first steps are those of one process.
    found = losses(ft.Run(tmp_path / "run"))
    assert largest(found[:2], losses(alone)[:2]) <= FP32
    assert len(found) == 6


def test_sizes_that_do_not_multiply_to_the_processes_are_refused(alone, tmp_path):
    done = start(alone, tmp_path / "run", "--num_processes", "2")
    assert done.status != 0
    assert "2 copies x 2 processes, but 2 were started" in done.stderr
    assert not (tmp_path / "run").exists()
