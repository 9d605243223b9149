"""A run's own plan is true: what it foresaw of memory is what was counted."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Finetune, write_recipe

from benchmarks.memory import recipe_of, write_base
from finetune import catalog
from finetune.memory import Meter
from finetune.run import Run


def test_the_measured_peak_of_a_run_is_within_a_tenth_of_its_plan(
    tmp_path: Path, finetune: Finetune
) -> None:
    write_base(tmp_path)
    recipe = recipe_of(tmp_path, "full", checkpointing=False, processes=1)
    path = write_recipe(tmp_path / "recipe.json", catalog.to_fields(recipe))
    done = finetune("train", path, "--backend", "single", "--output", tmp_path / "run")
    assert done.status == 0, done.output
    run = Run(tmp_path / "run")
    predicted = json.loads(run.plan.read_text())["prediction"]
    (counted,) = run.read_metrics("memory")
    assert predicted["peak_memory"] == counted["predicted"]  # every row has the longest's length
    assert counted["peak"] == pytest.approx(predicted["peak_memory"], rel=0.1)
    assert predicted["seconds"] == pytest.approx(3 * predicted["step_seconds"])
    assert "of tensors (measured" in done.stdout
    assert finetune("report", run.root).status == 0
    assert "measured / predicted" in run.report.read_text()


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
