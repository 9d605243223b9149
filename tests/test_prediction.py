"""A run's own plan is true: what it foresaw of memory is what was counted."""

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Finetune, environment, write_recipe

from benchmarks.job import DEEP, write_adapter_job
from benchmarks.memory import recipe_of, write_base
from finetune import catalog
from finetune.memory import Meter
from finetune.run import Run

NO_CODE_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
"""PyTorch's products on CPUs keep code for every shape that they met, which no plan counts."""


def test_the_measured_peak_of_a_run_is_within_a_tenth_of_its_plan(
    tmp_path: Path, finetune: Finetune
) -> None:
    write_base(tmp_path)
    recipe = recipe_of(tmp_path, "full", checkpointing=False, processes=1)
    path = write_recipe(tmp_path / "recipe.json", catalog.to_fields(recipe))
    words = ["train", path, "--backend", "single", "--output", tmp_path / "run"]
    done = finetune(*words, plot=True)
    assert done.status == 0, done.output
    run = Run(tmp_path / "run")
    assert run.loss_plot.is_file()
    predicted = json.loads(run.plan.read_text())["prediction"]
    (counted,) = run.read_metrics("memory")
    assert predicted["peak_memory"] == counted["predicted"]  # every row has the longest's length
    assert counted["peak"] == pytest.approx(predicted["peak_memory"], rel=0.1)
    assert predicted["seconds"] == pytest.approx(3 * predicted["step_seconds"])
    assert "of tensors (measured" in done.stdout
    assert finetune("report", run.root).status == 0
    assert "measured / predicted" in run.report.read_text()


def test_the_measured_peak_of_packs_is_within_a_tenth_of_their_plan(
    tmp_path: Path, finetune: Finetune
) -> None:
    """The packs of a micro-batch lie in one row; the plan counts them as rows."""
    shape = dataclasses.replace(DEEP, layers=4, rows=4)
    path = write_adapter_job(tmp_path / "job", shape, steps=2)
    words = ["train", path, "--backend", "single", "--precision", "bf16"]
    done = finetune(*words, "--output", tmp_path / "run", env=NO_CODE_KEPT)
    assert done.status == 0, done.output
    (counted,) = Run(tmp_path / "run").read_metrics("memory")
    assert 0.9 * shape.length < counted["length"] <= shape.length
    assert counted["peak"] == pytest.approx(counted["predicted"], rel=0.1)


def test_a_meter_counts_what_lives_at_once_and_nothing_from_before() -> None:
    kept = torch.ones(1_000_000)  # there before the model: not counted
    meter = Meter(torch.device("cpu"))
    model = torch.nn.Linear(1_000, 1_000, bias=False)  # 4 MB
    with meter.measuring(model):
        first = torch.ones(2_000_000)  # 8 MB, freed before the next one is made
        del first
        second = torch.ones(3_000_000)  # 12 MB: with the model the peak
        del second
    assert meter.peak == pytest.approx(16_000_000, abs=200_000)
    assert len(kept) == 1_000_000


def test_a_meter_counts_nothing_of_an_earlier_training() -> None:
    left: list[object] = [torch.ones(2_000_000)]  # 8 MB in a cycle, which is freed at any time
    left.append(left)
    del left
    meter = Meter(torch.device("cpu"))
    gc.collect()
    model = torch.nn.Linear(1_000, 1_000, bias=False)  # 4 MB
    with meter.measuring(model):
        pass
    assert meter.peak == pytest.approx(4_000_000, abs=200_000)


def test_a_meter_counts_the_buckets_of_ddp_once(tmp_path: Path) -> None:
    body = """
import sys, torch
from finetune.memory import Meter
torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=0, world_size=1)
meters = [Meter(torch.device("cpu")) for _ in range(3)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2_000, 2_000, bias=False))
for meter in meters:
    with meter.measuring(model):
        model(torch.ones(1, 2_000)).sum().backward()
        model.zero_grad(set_to_none=True)
print([meter.peak for meter in meters])
torch.distributed.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", body, tmp_path / "store"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, second, third = json.loads(done.stdout.splitlines()[-1])
    # The second forward pass makes DDP's 16 MB of buckets anew.
    assert second == pytest.approx(third, abs=4_000_000)
