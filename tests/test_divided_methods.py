"""Samplings, teachers and references under backends that divide a model, as on one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Tiny, Train, read, write_recipe
from divided import assert_refused, processes_of, reasons, sources_of

import finetune as ft
from finetune import catalog
from finetune.verification.proofs.checks import compare_steps, weights_apart
from finetune.verification.proofs.matrix import FP32
from finetune.verification.proofs.online_runs import differences, scale_of
from finetune.verification.proofs.runs import steps_of

STEPS = 2


@pytest.fixture(scope="module")
def sources(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models, tied Qwen3 whose logits differ between tokens, and data."""

    def change(name: str, weight: torch.Tensor) -> None:
        if "norm" not in name:
            weight.normal_(std=0.1)

    folder = tmp_path_factory.mktemp("divided")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "tie_word_embeddings": True}
    found: dict[str, Any] = {
        name: str(tiny.other(folder / name, "qwen3", seed, change, **sizes))
        for name, seed in (("model", 7), ("other", 8))
    }
    return found | sources_of(folder)


def fields_of(method: str, sources: dict[str, Any], **own: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "method": method,
        "model": {"name": sources["model"]},
        "data": [sources[{"grpo": "prompts", "dpo": "preference"}.get(method, "messages")]],
        "batch": {"rows": 8, "micro_rows": 2, "max_length": 128},
        "optim": {"lr": 1e-3, "warmup": 0},
        "saving": {"every": 1},
        "data_checks": "report",
        "max_steps": STEPS,
    }
    if method == "grpo":
        given |= {
            "reward_funcs": [{"function": "finetune.verification.proofs.fixtures:vowels"}],
            "num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "beta": 0.05,
        }  # fmt: skip
    return given | own


@pytest.fixture
def both(run_of: Train) -> Callable[[dict[str, Any], str], tuple[ft.Run, ft.Run]]:
    """Runs of one process and of a backend, which learn the same."""

    def run(given: dict[str, Any], backend: str) -> tuple[ft.Run, ft.Run]:
        several = run_of(backend, processes=processes_of(backend), fields=given)
        alone = run_of(fields=given)
        scale = scale_of(catalog.load(alone.recipe))
        told = (steps_of(each.metrics) for each in (alone, several))
        wrong, _ = compare_steps(*told, range(1, STEPS + 1), FP32, scale)
        assert wrong == differences(alone, several, FP32) == []
        assert weights_apart(alone, several, STEPS) <= FP32.weights
        return alone, several

    return run


ADAPTED = {"adapter": {"r": 4, "targets": "all-linear"}}


def test_completions_of_gathered_weights_are_those_of_one_process(sources, both):
    """Two samplings: before the first step, and after an update of the divided adapter.

    Four completions at a time: both batches of one process, one batch of each of two.
    """
    given = fields_of("grpo", sources, **ADAPTED, num_iterations=1, sampling_rows=4)
    alone, run = both(given, "tp")
    taken = [
        next(iter(each.read_metrics("train")))["metrics"]["sampling/memory"]
        for each in (alone, run)
    ]
    planned = read(run.plan)["prediction"]["sampling_weights"]
    assert taken[1] - taken[0] == pytest.approx(planned, rel=0.05)


@pytest.mark.slow
def test_a_divided_teacher_gives_the_losses_of_one_process(sources, both):
    own = {"teacher": {"name": sources["other"]}, "loss_type": "jsd", "ce_weight": 0.3}
    _, run = both(fields_of("distill", sources, **own), "tp")
    for counted in run.read_metrics("memory"):
        assert counted["peaks"] == pytest.approx(counted["planned"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own", "backend"),
    [
        ("grpo", {}, "pp"),  # whose reference at the start is a second divided model
        ("grpo", ADAPTED | {"batch": {"rows": 16, "micro_rows": 2, "max_length": 128}}, "tp_fsdp"),
        ("dpo", {"reference": "other"}, "tp"),
        ("dpo", {"reference": "other"}, "pp"),
    ],
)
def test_a_divided_method_learns_what_one_process_learns(sources, both, method, own, backend):
    named = {"reference": sources["other"]} if "reference" in own else {}
    both(fields_of(method, sources, **own | named), backend)


@pytest.mark.slow
def test_a_stored_teacher_is_read_by_stages_and_parts_of_rows(sources, both, tmp_path, finetune):
    given = fields_of("distill", sources, teacher={"name": sources["other"]})
    recipe = write_recipe(tmp_path / "teach.json", given)
    finetune("teach", recipe, "--output", tmp_path / "stored").passed()
    del given["teacher"]
    for backend in ("pp", "sp"):
        both(given | {"teacher_logps": str(tmp_path / "stored")}, backend)


@pytest.mark.parametrize(
    ("method", "backend", "problem"),
    [
        (ft.Distill(teacher=ft.Teacher("models/large")), "pp", ""),
        (
            ft.Distill(teacher=ft.Teacher("m", quantization="nf4")),
            "tp",
            "teacher.quantization: nf4",
        ),
        (ft.Distill(teacher_logps="stored"), "pp", ""),
        (ft.GRPO(), "pp", ""),
        (ft.GRPO(), "sp", "compares complete completions, and rows are split (backend sp)"),
        (
            ft.GRPO(vllm_server_base_url="http://x", adapter=ft.LoRA()),
            "tp",
            "an adapter that is divided",
        ),
        (ft.GRPO(beta=0.1), "tp_fsdp", "beta: its reference is a second model"),
    ],
)
def test_what_is_not_gathered_is_refused(method, backend, problem):
    recipe = dataclasses.replace(
        method,
        model=ft.Model("models/small"),
        batch=ft.Batch(rows=16, micro_rows=1, max_length=300),
    )
    if isinstance(method, ft.GRPO):
        recipe = dataclasses.replace(recipe, reward_funcs=(ft.Reward("json_valid"),))
    kind = "prompts" if isinstance(method, ft.GRPO) else "messages"
    found = reasons(recipe.with_data(ft.Data("rows.jsonl", kind)), backend)
    assert_refused([each for each in found if not each.startswith("processes")], problem)
