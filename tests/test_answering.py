"""Answers to held-out rows while training: those of the checkpoint, on every backend."""

from pathlib import Path
from typing import Any

import pytest
from conftest import once
from preference import written
from tiny_run import save_base, tiny_llama

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.evaluation.exact_match import exact_match, references
from finetune.evaluation.metrics.words import token_f1
from finetune.inference.generate import load
from finetune.planner import plan
from finetune.recipe import Data
from finetune.runs.run import Run

WORDS = ("one", "two words", "three short words", "four words of text")


@pytest.fixture(scope="session")
def folder(shared) -> Path:
    rows = [
        {"messages": [
            {"role": "user", "content": f"say {'it ' * number}now"},
            {"role": "assistant", "content": WORDS[number % 4]},
        ]}
        for number in range(7)
    ]  # fmt: skip

    def make(folder: Path) -> None:
        save_base(tiny_llama(), folder / "base")
        written(folder / "rows.jsonl", rows)

    return once(shared / "methods/answering", make)


def fields(folder: Path, **sections: Any) -> dict[str, Any]:
    data = [{"source": str(folder / "rows.jsonl"), "format": "messages"}]
    return {
        "method": "sft", "model": {"name": str(folder / "base")}, "adapter": {"r": 4},
        "data": data, "eval_data": data, "batch": {"rows": 4, "micro_rows": 2, "max_length": 96},
        "optim": {"lr": 2e-2, "schedule": "constant", "warmup": 0}, "max_steps": 16,
        "evaluation": {"every": 8, "metrics": ["f1", "exact"], "max_new_tokens": 24}, **sections,
    }  # fmt: skip


@pytest.fixture(scope="session")
def run(folder, run_of) -> Run:
    return run_of(fields=fields(folder))


def test_answers_are_those_of_the_checkpoint(run: Run, folder: Path) -> None:
    """Rows of one micro-batch differ in length, and lie side by side in training."""
    records = list(run.read_metrics("eval"))
    assert [record["step"] for record in records] == [8, 16]
    rows = references(Data(str(folder / "rows.jsonl"), "messages"))
    score = exact_match(load(run, 16), rows, max_new_tokens=24)
    said = [each.answer for each in score.examples]
    wanted = [str(row.messages[-1]["content"]) for row in rows]
    pairs = list(zip(said, wanted, strict=True))
    found = records[-1]["metrics"]
    assert found["exact"] == sum(one == other for one, other in pairs) / len(pairs)
    assert found["f1"] == pytest.approx(sum(token_f1(*pair) for pair in pairs) / len(pairs))
    assert 0 < found["f1"] < 1
    assert list(found) == ["f1", "exact", "exact_normalised", "stopped"]


def test_answering_changes_nothing_of_the_training(run, folder, train):
    other = train(fields=fields(folder, evaluation={"every": 8}))
    names = ("step", "loss", "grad_norm")
    losses = [
        [tuple(record[name] for name in names) for record in each.read_metrics("train")]
        for each in (run, other)
    ]
    assert losses[0] == losses[1]


def test_metrics_that_do_not_fit_are_refused_before_the_first_step(folder, tmp_path, train):
    with pytest.raises(FinetuneError, match=r"evaluation.metrics json: .* its answer is not JSON"):
        train(fields=fields(folder, evaluation={"metrics": ["json"]}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(FinetuneError, match="evaluation: there is nothing to evaluate on"):
        plan(catalog.from_fields(fields(folder, eval_data=[])), "single", 1)
    with pytest.raises(FinetuneError, match="did you mean 'exact'"):
        catalog.from_fields(fields(folder, evaluation={"metrics": ["exakt"]}))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "adapter"), [("fsdp_full_shard", {"r": 4}), ("zero3", None)])
def test_every_backend_answers_as_one_process_does(folder, run_of, backend, adapter):
    """Seven rows on two processes: one of them answers a batch less, and takes part in it."""
    given = fields(folder, adapter=adapter)
    found, wanted = (
        [record["metrics"] for record in run_of(each, fields=given).read_metrics("eval")]
        for each in (backend, "single")
    )
    assert found == wanted
