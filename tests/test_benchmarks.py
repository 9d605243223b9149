"""The benchmarks run, and their record says what was measured, where, and by which command."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_command

from benchmarks.kernels import Case, distance, timed
from benchmarks.startup import COMMANDS
from benchmarks.training import BACKENDS, add_ratios

MACHINE = {"devices", "processor", "cores", "memory_bytes", "load_average", "platform"}
MADE_BY = {"command", "commit", "versions", "python", "started", "note"}
RESULTS = ROOT / "benchmarks" / "results"


def test_a_quick_benchmark_writes_its_record(tmp_path: Path) -> None:
    words = ["startup", "training", "data", "--rows", "300", "--repeats", "1", "--steps", "2"]
    words += ["--backends", "single", "--note", "Only a test."]
    command = [sys.executable, "-m", "benchmarks", *words, "--to", str(tmp_path)]
    done = run_command(command, tmp_path / "cache", cwd=ROOT)
    assert done.status == 0, done.output
    startup = json.loads((tmp_path / "startup.json").read_text())
    training = json.loads((tmp_path / "training.json").read_text())
    data = json.loads((tmp_path / "data.json").read_text())
    for record in (startup, data, training):
        assert record.keys() == MACHINE | MADE_BY | {"results"}
        assert record["command"].startswith("python -m benchmarks startup training data ")
    assert startup["results"].keys() == {*COMMANDS, "first step"}
    for value in startup["results"].values():
        assert value["starts"] == 1
        assert 0 < value["best_seconds"] == value["median_seconds"]
    single = training["results"]["backends"]["single"]
    assert single["processes"] == 1
    assert single["tokens_per_second_of_single"] == single["peak_memory_bytes_of_single"] == 1
    assert single["tokens_per_second_of_ddp"] is None
    # Every row is cut to 128 tokens, so that a step is 16 x 128 tokens whatever the backend; with
    # two steps the median is their mean, and the rates are 1/x.
    assert single["tokens_per_second"] >= 0.999 * 16 * 128 / single["step_seconds"]
    prepared = data["results"]
    assert prepared["rows"] == 300
    assert prepared["rows_per_second"] == 300 / prepared["seconds"]
    assert prepared["tokens"] == round(300 * prepared["mean_tokens"])
    for name in ("startup", "training"):
        page = (tmp_path / f"{name}.md").read_text()
        assert "- Only a test." in page
        assert "| `" in page


def test_ratios_are_to_the_references_of_the_same_session() -> None:
    measured = {
        "single": {"tokens_per_second": 100.0, "peak_memory_bytes": 40},
        "ddp": {"tokens_per_second": 150.0, "peak_memory_bytes": 50},
        "zero2": {"tokens_per_second": 75.0, "peak_memory_bytes": 30},
    }
    add_ratios(measured)
    assert measured["zero2"]["tokens_per_second_of_single"] == 0.75
    assert measured["zero2"]["tokens_per_second_of_ddp"] == 0.5
    assert measured["zero2"]["peak_memory_bytes_of_ddp"] == 0.6


def test_the_committed_results_cover_every_backend() -> None:
    training = json.loads((RESULTS / "training.json").read_text())
    assert training["results"]["backends"].keys() == set(BACKENDS)
    for name in ("startup", "data", "training"):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert record["commit"] in (RESULTS / f"{name}.md").read_text()


def test_a_kernel_is_timed_in_turns_and_compared() -> None:
    calls: list[str] = []

    def work(name: str, values: list[float]) -> dict[str, torch.Tensor]:
        calls.append(name)
        return {"input": torch.tensor(values)}

    case = Case("x", lambda: work("plain", [3.0, 4.0]), lambda: work("ours", [3.0, 4.5]))
    found = timed(case, repeats=2)
    assert calls == ["plain", "ours"] * 5  # two of warmup, two timed, one compared
    assert found["difference"] == pytest.approx(0.1)
    assert found["gain"] == found["plain_seconds"] / found["ours_seconds"]
    assert distance({"a": torch.ones(2)}, {"a": torch.ones(2)}) == 0


def test_the_committed_kernels_are_exact_and_not_slower() -> None:
    record = json.loads((RESULTS / "kernels.json").read_text())
    assert record["commit"] in (RESULTS / "kernels.md").read_text()
    for name, case in record["results"]["cases"].items():
        assert case["gain"] > 1, name
        assert case["difference"] < 2e-2, name  # bf16 keeps 8 bits, through six layers
