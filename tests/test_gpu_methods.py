"""Each method on a GPU, next to the same recipe on the CPU, and what is done with a run later."""

import sys
from collections.abc import Callable
from typing import Any

import method_matrix
import pytest
import torch
from conftest import IN_TURN, read, run_command, write_recipe, written
from gpus import NEEDS_GPU
from safetensors.torch import load_file
from test_method_backends import OF_A_PROCESS, TIES, Work, sources, work
from test_scores import CLASSES, labelled

from finetune.runs.run import Run

__all__ = ["sources", "work"]  # fixtures

pytestmark = NEEDS_GPU

ORDER = 1e-4
"""Losses in fp32 (TF32 is off) whose sums are added in another order."""
ON_CPU: dict[str, str] = {"CUDA_VISIBLE_DEVICES": ""}


def fields_of(work: Work, method: str) -> dict[str, Any]:
    """The recipe of a method."""
    if method == "classifier":
        source = written(work.folder / "labelled.jsonl", labelled())
        work.sources["labelled"] = {"source": str(source), "format": "labelled"}
        return work.fields(method, "dense") | {"labels": list(CLASSES)}
    if method == "grpo":
        return work.fields("rloo", "dense") | {"method": "grpo"}
    return work.fields(method, "dense")


@pytest.fixture(scope="module")
def on_cpu(work: Work) -> Callable[[str], Run]:
    """Runs of all methods on the CPU, made by one process."""
    places = {method: work.folder / f"cpu-{method}" for method in method_matrix.METHODS}
    recipes = {str(place): fields_of(work, method) for method, place in places.items()}
    asked = write_recipe(work.folder / "recipes.json", recipes)
    run_command([sys.executable, str(IN_TURN), str(asked)], work.folder, env=ON_CPU).passed()
    return lambda method: Run(places[method])


@pytest.mark.parametrize("method", method_matrix.METHODS)
def test_a_method_measures_on_a_gpu_what_it_does_on_a_cpu(train, work, on_cpu, method):
    run = train(fields=fields_of(work, method))
    assert read(run.realised)["device"].startswith("cuda")
    steps = zip(run.read_metrics("train"), on_cpu(method).read_metrics("train"), strict=True)
    for mine, theirs in steps:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=ORDER, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * ORDER)
        metrics, wanted = (each.get("metrics", {}) for each in (mine, theirs))
        assert metrics.keys() == wanted.keys()
        for name in metrics.keys() - OF_A_PROCESS - (TIES if mine["step"] == 1 else set()):
            assert metrics[name] == pytest.approx(wanted[name], rel=10 * ORDER, abs=1e-4), name


@pytest.mark.parametrize("method", ["dpo", "grpo"])
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3"])
def test_a_method_trains_in_bf16_on_a_sharding_backend(tmp_path, finetune, work, method, backend):
    recipe = write_recipe(tmp_path / "r.json", fields_of(work, method))
    words = ["--backend", backend, "--processes", "1", "--output", tmp_path / "run"]
    finetune("launch", recipe, *words).passed()
    assert any(step["grad_norm"] > 0 for step in list(Run(tmp_path / "run").read_metrics("train")))


ADAPTED: dict[str, Any] = {"adapter": {"r": 8}, "optim": {"lr": 5e-3, "warmup": 0}}


def test_a_run_is_evaluated_and_merged_on_a_gpu_as_on_a_cpu(tiny, tmp_path, train, finetune):
    run = train(**ADAPTED)
    found: dict[str, dict[str, Any]] = {}
    for place, variables in (("gpu", {}), ("cpu", ON_CPU)):
        folder = tmp_path / place
        finetune(
            "eval", run.root, "--data", tiny.eval_data, "--format", "messages",
            "--max-new-tokens", "8", "--output", folder / "eval", env=variables,
        ).passed()  # fmt: skip
        found[place] = read(folder / "eval" / "results.json")
        finetune("export", run.root, "--to", folder / "merged", "--merge", env=variables).passed()
    here, there = (found[place]["measures"]["loss"] for place in ("gpu", "cpu"))
    for side in ("before", "after"):
        assert here[side] == pytest.approx(there[side], rel=1e-2)  # bf16 on the GPU
    merged = [load_file(tmp_path / at / "merged" / "model.safetensors") for at in ("gpu", "cpu")]
    assert merged[0].keys() == merged[1].keys()
    for name, tensor in merged[0].items():
        assert torch.allclose(tensor.float(), merged[1][name].float(), atol=1e-2, rtol=1e-2), name


def test_one_process_on_a_gpu_is_proved(tiny, tmp_path, finetune):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**ADAPTED))
    finetune(
        "prove", recipe, "--backends", "fsdp_full_shard,zero3", "--processes", "1", "--steps", "6",
        "--jobs", "2", "--output", tmp_path / "proof",
    ).passed()  # fmt: skip
