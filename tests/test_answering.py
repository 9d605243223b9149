"""Answers to held-out rows while training: those of the checkpoint, on every backend."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, write_recipe
from tiny_run import save_base, tiny_llama

import finetune as ft
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.evaluation.exact_match import answers, references
from finetune.evaluation.metrics.words import token_f1
from finetune.inference.generate import load
from finetune.planner import plan
from finetune.recipe import Data
from finetune.runs.run import Run

WORDS = ("one", "two words", "three short words", "four words of text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answering")
    save_base(tiny_llama(), folder / "base")
    rows = [
        {"messages": [
            {"role": "user", "content": f"say {'it ' * number}now"},
            {"role": "assistant", "content": WORDS[number % 4]},
        ]}
        for number in range(7)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def fields(folder: Path, **sections: Any) -> dict[str, Any]:
    data = [{"source": str(folder / "rows.jsonl"), "format": "messages"}]
    return {
        "method": "sft",
        "model": {"name": str(folder / "base")},
        "adapter": {"r": 4},
        "data": data,
        "eval_data": data,
        "batch": {"rows": 4, "micro_rows": 2, "max_length": 96},
        "optim": {"lr": 2e-2, "schedule": "constant", "warmup": 0},
        "max_steps": 16,
        "evaluation": {"every": 8, "metrics": ["f1", "exact"], "max_new_tokens": 24},
    } | sections


def train(folder: Path, output: Path, **sections: Any) -> Run:
    recipe = catalog.from_fields(fields(folder, **sections))
    return ft.train(recipe, precision="fp32", output=output)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        return train(folder, folder / "run")


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))


def test_answers_are_those_of_the_checkpoint(run: Run, folder: Path) -> None:
    """Rows of one micro-batch differ in length, and lie side by side in training."""
    records = list(run.read_metrics("eval"))
    assert [record["step"] for record in records] == [8, 16]
    rows = references(Data(str(folder / "rows.jsonl"), "messages"))
    said = answers(load(run, 16), rows, max_new_tokens=24)
    wanted = [str(row.messages[-1]["content"]) for row in rows]
    pairs = list(zip(said, wanted, strict=True))
    found = records[-1]["metrics"]
    assert found["exact"] == sum(one == other for one, other in pairs) / len(pairs)
    assert found["f1"] == pytest.approx(sum(token_f1(*pair) for pair in pairs) / len(pairs))
    assert 0 < found["f1"] < 1
    assert list(found) == ["f1", "exact", "exact_normalised", "stopped"]


def test_answering_changes_nothing_of_the_training(run: Run, folder: Path, tmp_path: Path) -> None:
    other = train(folder, tmp_path / "run", evaluation={"every": 8})
    names = ("step", "loss", "grad_norm")
    losses = [
        [tuple(record[name] for name in names) for record in each.read_metrics("train")]
        for each in (run, other)
    ]
    assert losses[0] == losses[1]


def test_metrics_that_do_not_fit_are_refused_before_the_first_step(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError, match=r"evaluation.metrics json: .* its answer is not JSON"):
        train(folder, tmp_path / "run", evaluation={"metrics": ["json"]})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(FinetuneError, match="evaluation: there is nothing to evaluate on"):
        plan(catalog.from_fields(fields(folder, eval_data=[])), "single", 1)
    with pytest.raises(FinetuneError, match="did you mean 'exact'"):
        catalog.from_fields(fields(folder, evaluation={"metrics": ["exakt"]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "adapter"), [("ddp", {"r": 4}), ("fsdp_full_shard", {"r": 4}), ("zero3", None)]
)
def test_every_backend_answers_as_one_process_does(
    run: Run, folder: Path, tmp_path: Path, finetune: Finetune, backend: str, adapter: Any
) -> None:
    """Seven rows on two processes: one of them answers a batch less, and takes part in it."""
    alone = run if adapter else train(folder, tmp_path / "alone", adapter=None)
    recipe = write_recipe(tmp_path / "r.json", fields(folder, adapter=adapter))
    done = finetune(
        "launch", recipe, "--backend", backend, "--processes", "2", "--precision", "fp32",
        "--output", tmp_path / "run",
    )  # fmt: skip
    assert done.status == 0, done.output
    found, wanted = (
        [record["metrics"] for record in each.read_metrics("eval")]
        for each in (Run(tmp_path / "run"), alone)
    )
    assert found == wanted
