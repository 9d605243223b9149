"""Hybrid sharding on four real processes: two copies of two shards, and what cannot be."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Finetune, Tiny, warm_python, write_recipe
from safetensors.torch import load_file
from test_backends import FP32, largest, losses

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.runs.run import Run


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    fields = tiny.fields(adapter={"r": 4}, batch={"micro_rows": 1})
    return write_recipe(folder / "r.json", fields)


@pytest.fixture(scope="module")
def alone(recipe: Path, finetune: Finetune) -> Run:
    run = Run(recipe.parent / "alone")
    done = finetune("train", recipe, "--precision", "fp32", "--output", run.root, "--no-plot")
    assert done.status == 0, done.output
    return run


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def start(words: list[object], output: Path) -> "subprocess.CompletedProcess[str]":
    given = ["--config_file", ROOT / "accelerate_configs/hsdp.yaml", "--mixed_precision", "no"]
    command = [*given, *words, "--main_process_port", "0", "-m", "finetune", "train"]
    return subprocess.run(
        [warm_python(), "-m", "accelerate.commands.launch", *map(str, command),
         str(output.parent / "r.json"), "--output", str(output), "--no-plot"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_two_copies_of_two_shards_learn_what_one_process_learns(recipe, alone):
    run = Run(recipe.parent / "four")
    done = start([], run.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert largest(losses(run), losses(alone)) <= FP32
    assert largest(losses(run, "eval"), losses(alone, "eval")) <= FP32
    assert read_json(run.plan)["mesh"] == {"replicate": 2, "shard": 2}
    held = read_json(run.realised)["ranks"]
    whole = max(rank["optimizer"] for rank in read_json(alone.realised)["ranks"])
    assert len(held) == 4
    assert sum(rank["optimizer"] for rank in held) == 2 * whole
    # Each element of the checkpoint is written once, by one of the copies.
    state = run.checkpoint(6) / "state"
    written = sum(
        tensor.numel()
        for path in state.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if "|weight|" in name
    )
    assert written == whole


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
def test_what_accelerate_builds_is_compared(recipe, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CHANGED)
    config = ROOT / "accelerate_configs/hsdp_shard_grad_op.yaml"
    done = subprocess.run(
        [warm_python(), "-m", "accelerate.commands.launch", "--config_file", str(config),
         "--mixed_precision", "no", "--main_process_port", "0", str(script), "train", str(recipe),
         "--output", str(tmp_path / "run")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "the plan has replicate 2 x shard 2, Accelerate built shard 4" in done.stderr
    assert Run(tmp_path / "run").steps() == []


def test_other_axes_that_reach_a_worker_are_refused():
    given = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true"}
    sizes = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    with pytest.raises(FinetuneError, match="tensor 2 with Accelerate's FSDP: not supported"):
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
    done = finetune("plan", "smollm2_135m_full", *words)
    assert done.status == 2
    assert problem in done.stderr


@pytest.mark.slow
def test_a_checkpoint_of_copies_continues_anywhere_and_back(recipe, alone, finetune):
    place = recipe.parent / "moved"
    for steps, backend, processes, more in (
        (2, "hsdp_shard_grad_op", 4, []),
        (3, "zero2", 2, []),
        (4, "hsdp", 4, ["--shard-size", "4"]),
        (6, "fsdp_full_shard", 2, []),
    ):
        done = finetune(
            "launch", recipe, f"max_steps={steps}", "--backend", backend, "--processes", processes,
            "--precision", "fp32", "--output", place, "--resume", "auto", "--no-plot", *more,
        )  # fmt: skip
        assert done.status == 0, done.output
    # The schedule's end moved with max_steps: only the first steps are those of one process.
    assert largest(losses(Run(place))[:2], losses(alone)[:2]) <= FP32
    assert len(losses(Run(place))) == 6


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--num_processes", "2"], "2 copies x 2 processes, but 2 were started"),
        (
            ["--parallelism_config_dp_shard_size", "4"],
            "2 copies x 4 processes, but 4 were started",
        ),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes_are_refused(recipe, words, problem):
    done = start(words, recipe.parent / "refused")
    assert done.returncode != 0
    assert problem in done.stderr
    assert not (recipe.parent / "refused").exists()
