"""Recipes, runs and checks of the tests that divide a model over processes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Tiny, accelerate_launch, conversations, losses, once, read, write_recipe
from method_matrix import reasons
from preference import pairs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import finetune as ft
from finetune import backend as backends
from finetune import catalog
from finetune.planner import plan
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.workload import Workload
from finetune.verification.memory.mesh_comparison import Stages
from finetune.verification.memory.traced_step import verify
from finetune.verification.proofs.checks import compare_steps, weights_apart
from finetune.verification.proofs.matrix import FP32
from finetune.verification.proofs.runs import steps_of

STEPS, MIDDLE = 2, 1
SIDES = ("chosen", "rejected")
SHORT: dict[str, Any] = {
    "max_steps": STEPS, "saving": {"every": MIDDLE}, "evaluation": {"every": MIDDLE},
}  # fmt: skip
BASE = ft.SFT(ft.Model("models/small")).with_data(ft.Data("rows.jsonl", "messages"))
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "hidden_size": 48, "vocab_size": 64,
}  # fmt: skip


def processes_of(backend: str) -> int:
    return backends.load(backend).processes


def qwen(tiny: Tiny, shared: Path) -> dict[str, Any]:
    """Sections of a tied Qwen3 of five layers, whose q/k norms have weights."""

    def change(name: str, weight: torch.Tensor) -> None:
        if "norm" in name:
            weight += 0.1 * torch.randn_like(weight)

    sizes = {"num_hidden_layers": 5, "head_dim": 16, "tie_word_embeddings": True}
    make = lambda place: tiny.other(place, "qwen3", change=change, **sizes)  # noqa: E731
    return SHORT | {"model": {"name": str(once(shared / "qwen", make))}}


def mixture(tiny: Tiny, shared: Path) -> dict[str, Any]:
    """Sections of a mixture with q/k norms, whose experts are balanced.

    Of each pair of experts, a token first chooses the one whose logit is positive.
    """

    def change(name: str, weight: torch.Tensor) -> None:
        if "norm" in name:
            weight += 0.1 * torch.randn_like(weight)
        else:
            weight.normal_(std=0.08)
        if name.endswith("mlp.gate.weight"):
            weight[1::2] = -weight[::2]

    sizes = {
        "moe_intermediate_size": 24, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }  # fmt: skip
    make = lambda place: tiny.other(place, "qwen3_moe", change=change, **sizes)  # noqa: E731
    return SHORT | {"model": {"name": str(once(shared / "moe", make)), "router_aux_loss": "0.1"}}


def sources_of(folder: Path, count: int = 24) -> dict[str, dict[str, str]]:
    """Data of each format that a method takes."""
    given, spoken = pairs(count), conversations(count)
    answers = [(pair, pair[name], name == "chosen") for pair in given for name in SIDES]
    rows: dict[str, list[dict[str, Any]]] = {
        "preference": given,
        "text": [{"text": row[-1]["content"]} for row in spoken],
        "kto": [
            {"prompt": pair["prompt"], "completion": answer, "label": chosen}
            for pair, answer, chosen in answers
        ],
        "prompts": [{"prompt": row[0]["content"]} for row in spoken[:16]],
        "messages": [{"messages": row} for row in spoken],
        "labelled": [
            {"text": answer[0]["content"], "label": "ab"[chosen]} for _, answer, chosen in answers
        ],
    }
    found = {}
    for name, each in rows.items():
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in each))
        found[name] = {"source": str(source), "format": name}
    return found


def assert_learned(reference: ft.Run, run: ft.Run, first: int = 1, steps: int = STEPS) -> None:
    """Losses, norms and weights of a run within what a proof allows."""
    told = (steps_of(each.metrics) for each in (reference, run))
    wrong, _ = compare_steps(*told, range(first, steps + 1), FP32)
    assert wrong == []
    assert weights_apart(reference, run, steps) <= FP32.weights


def assert_equal(reference: ft.Run, run: ft.Run, steps: int = STEPS) -> None:
    """What was learned, and the last evaluation."""
    assert_learned(reference, run, steps=steps)
    alone, here = (losses(each, "eval")[-1] for each in (reference, run))
    assert here == pytest.approx(alone, rel=FP32.loss)


def assert_same_logits(first: ft.Run, second: ft.Run) -> None:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(each.final, dtype=torch.float32)(ids).logits
            for each in (first, second)
        ]
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def assert_planned(run: ft.Run, within: float = 0.05) -> None:
    """The peak of every stage's fullest process is about what the plan says of it.

    Copies of the data have other rows, and the plan is of the fullest.
    """
    counted, settled = list(run.read_metrics("memory"))[-1], read(run.plan)
    assert len(counted["planned"]) == len(counted["peaks"]) == settled["processes"]
    stages = settled["mesh"].get("pipeline", 1)
    planned, peaks = (
        np.reshape(counted[name], (stages, -1)).max(axis=1) for name in ("planned", "peaks")
    )
    assert planned == pytest.approx(peaks, rel=within)
    largest = max(counted["peaks"]), max(counted["planned"])
    assert (counted["peak"], counted["predicted"]) == largest


def parameters_held(run: ft.Run) -> list[int]:
    return [rank["parameters"] for rank in read(run.realised)["ranks"]]


def weights_written(run: ft.Run, step: int = STEPS) -> int:
    """Elements of all weights in a checkpoint, where each should be written once."""
    files = (run.checkpoint(step) / "state").glob("*.safetensors")
    tensors = [item for path in files for item in load_file(path).items()]
    return sum(value.numel() for name, value in tensors if "|weight|" in name)


def counted_step(
    model: str, backend: str | Path, rows: int, folder: Path
) -> tuple[list[dict[str, Any]], Workload, Stages]:
    """The bytes of each collective of a step on each of four processes, its plan and its trace."""
    texts = [{"text": f"{number} and then " * 40} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    fields = {
        "method": "pretrain",
        "model": {"name": model, "activation_checkpointing": True},
        "data": [{"source": str(folder / "rows.jsonl"), "format": "text"}],
        "batch": {"rows": rows, "micro_rows": 2, "max_length": 48, "overlong": "truncate"},
        "data_checks": "report",
        "max_steps": 2,
    }
    recipe = write_recipe(folder / "r.json", fields)
    words = (folder, "train", recipe, "--output", folder / "run", "--no-plot")
    script = ROOT / "tests/count_collectives.py"
    settled = dataclasses.replace(backends.load(str(backend)), precision="fp32")
    accelerate_launch(backend, folder, script, *words, env=settled.axes.variables()).passed()
    workload, traced = traced_plan(catalog.resolve(str(recipe)), settled)
    return [read(folder / f"counted-{rank}.json") for rank in range(4)], workload, traced


def traced_plan(recipe: ft.Recipe, machine: backends.Backend) -> tuple[Workload, Stages]:
    """The plan of a recipe on four processes, and what a trace of it counts."""
    settled = plan(recipe, machine, 4)
    workload = workload_of(settled, model_source(recipe).shape)
    traced = verify(settled, workload)
    assert isinstance(traced, Stages)
    return workload, traced


def refused(backend: str, fields: dict[str, Any], sizes: dict[str, Any], **batch: int) -> list[str]:
    """Reasons against a model from a config on a backend with sizes of its axes."""
    recipe = dataclasses.replace(BASE, model=ft.Model(config=LLAMA | fields, tokenizer="x"))
    recipe = recipe.with_batch(**({"rows": 64, "micro_rows": 1} | batch))
    return reasons(recipe, *backends.divided(backends.load(backend), None, sizes))


def assert_named(found: list[str], problem: str) -> None:
    """Among the problems is this one; there are none where it is empty."""
    assert any(problem in each for each in found) if problem else found == []


def assert_refused(found: list[str], problem: str) -> None:
    """For the one problem that names this; for none where it is empty."""
    assert [problem in each for each in found] == ([True] if problem else [])


def write_config(path: Path, backend: str, *changes: tuple[str, str]) -> Path:
    """A file of Accelerate like that of a backend, with some words replaced."""
    text = (ROOT / f"accelerate_configs/{backend}.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path
