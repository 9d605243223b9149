"""Each method trains on each group of backends as on one process, where no other test says so."""

from pathlib import Path
from typing import Any

import method_matrix
import pytest
import torch
from conftest import Runs, Tiny
from divided import sources_of
from preference import counted, other_model
from safetensors.torch import load_file

from finetune import catalog
from finetune.runs.run import Run

NEAR = 2e-5
"""Relative difference of losses in fp32, whose sums are added in another order."""
OF_A_PROCESS = {"sampling/tokens_per_second", "sampling/memory"}
"""Metrics that depend on the machine."""
TIES = {"rewards/accuracies"}
"""Metrics of the first step that compare rewards of 0, which a GPU may round by more."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return sources_of(tmp_path_factory.mktemp("data"))


class Work:
    """Recipes, and what one process or a backend makes of them."""

    def __init__(
        self, folder: Path, tiny: Tiny, sources: dict[str, dict[str, str]], runs_of: Runs
    ) -> None:
        self.folder, self.sources, self.runs_of = folder, sources, runs_of
        sizes: dict[str, Any] = {
            "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8,
            "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        }  # fmt: skip
        mixture = tiny.other(folder / "mixture", "qwen3_moe", **sizes)
        self.models = {"dense": tiny.model, "mixture": mixture}
        self.teacher = other_model(tiny, folder / "teacher")
        self.adapted = {"dpo": {"reference": str(self.teacher)}, "distill": {"loss_type": "jsd"}}

    def fields(self, name: str, model: str, **batch: Any) -> dict[str, Any]:
        method = name.removeprefix(WITH_LORA)
        given: dict[str, Any] = {
            "method": method,
            "model": {"name": str(self.models[model])},
            "data": [self.sources[method_matrix.ROWS.get(method, "messages")]],
            "batch": {"rows": 8, "micro_rows": 2, "max_length": 128, **batch},
            "optim": {"lr": 1e-3, "warmup": 0},
            "data_checks": "report",
            "max_steps": 2,
        }
        if method == "classifier":
            given["labels"] = ["a", "b"]
        if method == "distill":
            given["teacher"] = {"name": str(self.teacher)}
        if method in ("kto", "reward", "classifier"):
            given["eval_rows"] = 4
        if method in ("grpo", "rloo"):
            given |= {
                "reward_funcs": [{"function": "finetune.verification.proofs.fixtures:vowels"}],
                "num_generations": 2, "max_completion_length": 6,
            }  # fmt: skip
        if name != method:
            given |= {"adapter": {"r": 4}} | self.adapted.get(method, {})
            given["batch"]["padding_free"] = False
        return given

    def run(self, method: str, backend: str, model: str, methods: list[str]) -> Run:
        """A run of a method; all methods of a backend are trained in one launch."""
        return self.runs_of(backend, {each: self.fields(each, model) for each in methods})[method]


@pytest.fixture(scope="module")
def work(tiny, sources, runs_of, tmp_path_factory) -> Work:
    return Work(tmp_path_factory.mktemp("work"), tiny, sources, runs_of)


def assert_equal(run: Run, alone: Run) -> None:
    """Losses, gradient norms and all else that a method measures in steps and evaluations."""
    assert any(step["grad_norm"] > 0 for step in run.read_metrics("train"))
    mine_and_theirs = (
        pair
        for kind in ("train", "eval")
        for pair in zip(run.read_metrics(kind), alone.read_metrics(kind), strict=True)
    )
    for mine, theirs in mine_and_theirs:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=NEAR)
        norms = [each.get("grad_norm", 0.0) for each in (mine, theirs)]  # none of an evaluation
        assert norms[0] == pytest.approx(norms[1], rel=10 * NEAR)
        metrics, wanted = (
            {name: value for name, value in each.get("metrics", {}).items() if value is not None}
            for each in (mine, theirs)
        )
        assert metrics.keys() == wanted.keys()
        for name in metrics.keys() - OF_A_PROCESS:
            assert metrics[name] == pytest.approx(wanted[name], rel=10 * NEAR, abs=1e-5), name


def left_to(test: str) -> list[tuple[str, str]]:
    """Cells of the table in docs/backends.md that a test of this file answers for."""
    return [
        (method, column)
        for method in method_matrix.METHODS
        for column in (*method_matrix.GROUPS, method_matrix.PACKED)
        if method_matrix.test_of(method, column) == test
        and method_matrix.cell(method, column) == "yes"
    ]


WITH_LORA = "lora-"
ADAPTED = [f"{WITH_LORA}{method}" for method in ("dpo", "kto", "distill", "classifier")]
"""Methods that need another model, other weights or a head: with padded rows, too."""
CELLS = left_to(method_matrix.EVERYWHERE)
CELLS += [(name, column) for column in method_matrix.SEVERAL.split("; ") for name in ADAPTED]
OF_COLUMN: dict[str, list[str]] = {}
for _method, _column in CELLS:
    OF_COLUMN.setdefault(_column, []).append(_method)
ALONE = {"dense": [*method_matrix.METHODS, *ADAPTED], "mixture": OF_COLUMN["`ep`"]}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "column"), CELLS)
def test_a_method_trains_there_as_on_one_process(work, method, column):
    backend, model = method_matrix.GROUPS[column][0], "mixture" if column == "`ep`" else "dense"
    alone = work.run(method, "single", model, ALONE[model])
    run = work.run(method, backend, model, OF_COLUMN[column])
    assert_equal(run, alone)
    if method.endswith(("reward", "classifier")):  # a head that no base has is published
        mine, theirs = (load_file(next(e.final.glob("*model.safetensors"))) for e in (run, alone))
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.allclose(tensor, theirs[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method, _ in left_to(method_matrix.PACKS)])
def test_packs_train_as_rows_do(work, train, method):
    """All packs in one step, so that its rows are those of the data."""
    packed = {"packing": True, "micro_rows": 1, "max_length": 256}
    recipe = work.fields(method, "dense", **packed)
    counts = counted(recipe)
    rows = counts["documents"] // catalog.from_fields(recipe).documents_per_row
    assert counts["rows"] < rows
    packs = train("packs", fields=work.fields(method, "dense", **packed, rows=counts["rows"]))
    assert_equal(packs, train("rows", fields=work.fields(method, "dense", rows=rows)))
