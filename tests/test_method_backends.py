"""Each method trains on each group of backends as on one process, where no other test says so."""

import json
from pathlib import Path
from typing import Any

import method_matrix
import pytest
import torch
from conftest import Tiny, conversations, write_recipe
from test_dpo import other_model, pairs
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import finetune as ft
from finetune import catalog
from finetune.runs.run import Run

NEAR = 2e-5
"""Relative difference of losses in fp32, whose sums are added in another order."""
STEPS = 2
OF_A_PROCESS = {"sampling/tokens_per_second", "sampling/memory"}
"""Metrics that depend on the machine."""
TIES = {"rewards/accuracies"}
"""Metrics of the first step that compare rewards of 0, which a GPU may round by more."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Data of each kind that a method takes."""
    folder = tmp_path_factory.mktemp("data")
    rows: dict[str, list[dict[str, Any]]] = {
        "preference": pairs(),
        "text": [{"text": row[-1]["content"]} for row in conversations(24)],
        "kto": [
            {"prompt": pair["prompt"], "completion": pair[answer], "label": answer == "chosen"}
            for pair in pairs()
            for answer in ("chosen", "rejected")
        ],
        "prompts": [{"prompt": row[0]["content"]} for row in conversations(16)],
        "messages": [{"messages": row} for row in conversations(24)],
        "labelled": [
            {"text": pair[answer][0]["content"], "label": "ab"[answer == "chosen"]}
            for pair in pairs()
            for answer in ("chosen", "rejected")
        ],
    }
    found = {}
    for name, each in rows.items():
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in each))
        found[name] = {"source": str(source), "format": name}
    return found


class Work:
    """Recipes, and what one process makes of them."""

    def __init__(self, folder: Path, tiny: Tiny, sources: dict[str, dict[str, str]]) -> None:
        self.folder, self.sources = folder, sources
        self.models = {"dense": tiny.model, "mixture": mixture(folder / "mixture", tiny.model)}
        self.teacher = other_model(tiny, folder / "teacher")
        self.runs: dict[tuple[str, str], Run] = {}
        self.count = 0

    def fields(self, method: str, model: str, **batch: Any) -> dict[str, Any]:
        name = str(self.models[model])
        given: dict[str, Any] = {
            "method": method,
            "model": {"name": name},
            "data": [self.sources[method_matrix.ROWS.get(method, "messages")]],
            "batch": {"rows": 8, "micro_rows": 2, "max_length": 128, **batch},
            "optim": {"lr": 1e-3, "warmup": 0},
            "data_checks": "report",
            "max_steps": STEPS,
        }
        if method == "classifier":
            given["labels"] = ["a", "b"]
        if method == "distill":
            given["teacher"] = {"name": str(self.teacher)}
        if method in ("grpo", "rloo"):
            given |= {
                "reward_funcs": [{"function": "finetune.verification.proofs.fixtures:vowels"}],
                "num_generations": 2, "max_completion_length": 6,
            }  # fmt: skip
        return given

    def train(self, given: dict[str, Any]) -> Run:
        self.count += 1
        place = self.folder / f"run-{self.count}"
        return ft.train(catalog.from_fields(given), precision="fp32", output=place)

    def alone(self, method: str, model: str) -> Run:
        """The run of one process, made once."""
        if (method, model) not in self.runs:
            self.runs[method, model] = self.train(self.fields(method, model))
        return self.runs[method, model]


@pytest.fixture(scope="module")
def work(
    tiny: Tiny, sources: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Work:
    return Work(tmp_path_factory.mktemp("work"), tiny, sources)


def mixture(folder: Path, dense: Path) -> Path:
    """Write a model with four experts in each layer."""
    tokenizer = AutoTokenizer.from_pretrained(dense)
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer),
        num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, bos_token_id=None,
        max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(7)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_equal(run: Run, alone: Run) -> None:
    """Losses, gradient norms and everything else that a method measures at each step."""
    steps = list(zip(run.read_metrics("train"), alone.read_metrics("train"), strict=True))
    assert any(mine["grad_norm"] > 0 for mine, _ in steps)
    for mine, theirs in steps:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=NEAR)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * NEAR)
        metrics, wanted = (each.get("metrics", {}) for each in (mine, theirs))
        assert metrics.keys() == wanted.keys()
        for name in metrics.keys() - OF_A_PROCESS:
            assert metrics[name] == pytest.approx(wanted[name], rel=10 * NEAR, abs=1e-5), name


def left_to(test: str) -> list[tuple[str, str]]:
    """Cells of the README's table that a test of this file answers for."""
    return [
        (method, column)
        for method in method_matrix.METHODS
        for column in (*method_matrix.GROUPS, method_matrix.PACKED)
        if method_matrix.test_of(method, column) == test
        and method_matrix.cell(method, column) == "yes"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "column"), left_to(method_matrix.EVERYWHERE))
def test_a_method_trains_there_as_on_one_process(work, finetune, tmp_path, method, column):
    backend, model = method_matrix.GROUPS[column][0], "mixture" if column == "`ep`" else "dense"
    done = finetune(
        "launch", write_recipe(tmp_path / "r.json", work.fields(method, model)), "--backend",
        backend, "--precision", "fp32", "--output", tmp_path / "run", "--no-plot",
    )  # fmt: skip
    assert done.status == 0, done.output
    assert_equal(Run(tmp_path / "run"), work.alone(method, model))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "_"), left_to(method_matrix.PACKS))
def test_packs_train_as_rows_do(work, method, _):
    """All packs in one step, so that its rows are those of the data."""
    packed = {"packing": True, "micro_rows": 1, "max_length": 256}
    recipe = work.fields(method, "dense", **packed)
    counted = work.train(recipe)
    counts = json.loads(counted.data.read_text())["train"]
    packs = work.train(work.fields(method, "dense", **packed, rows=counts["rows"]))
    rows = counts["documents"] // catalog.from_fields(recipe).documents_per_row
    assert counts["rows"] < rows
    assert_equal(packs, work.train(work.fields(method, "dense", rows=rows)))
