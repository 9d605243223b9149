"""KTO equals published values; its KL is that of the step, however the step is cut or spread."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny, once, slow_but
from documents import documents_of
from oracles import published
from preference import (
    CUTS,
    Steps,
    answer_sums,
    assert_equal_losses,
    fields_of,
    packed_and_alone,
    pairs,
    plain,
    sequences,
    steps_of,
    train,
    written,
)
from preference import assert_equal as near_enough

import finetune as ft
from finetune import catalog
from finetune.data.audit import mistakes
from finetune.data.rows.order import rows_of_step
from finetune.data.rows.store import Rows, single_rows
from finetune.errors import FinetuneError
from finetune.reports.inspection import inspect
from finetune.training.reference.answer_logps import mismatched


@pytest.fixture(scope="session")
def data(shared) -> Path:
    """Answers of which every third is unwanted, in the order of no label."""
    rows = (
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 0}
        for number, row in enumerate(pairs())
    )
    return once(shared / "methods/judged.jsonl", lambda path: written(path, rows))


def fields(tiny: Tiny, data: Path, **sections: Any) -> dict[str, Any]:
    return fields_of("kto", tiny.model, data, "kto", **{"beta": 0.3, "max_steps": 3} | sections)


def assert_equal(found: Steps, wanted: Steps) -> None:
    near_enough(found, wanted, near=1e-4)
    assert_equal_losses(found, wanted)


PUBLISHED: dict[str, dict[str, Any]] = {
    "beta0.1/lora": {"micro_rows": 2, "padding_free": False},
    "beta0.1/full": {},
    "beta0.1_undesirable1.5/lora": {"micro_rows": 1},
}


@pytest.mark.parametrize("name", slow_but(("beta0.1/lora",), PUBLISHED))
def test_training_reproduces_published_values(assets, tmp_path, name):
    """Eight rows at once; TRL gives 0.502 in place of 0.462 for four micro-batches of two."""
    given, published_run = published(assets, tmp_path, "kto", name)
    given["batch"] |= PUBLISHED[name]
    found = steps_of(train(tmp_path / "run", given))
    for mine, theirs in zip(found, published_run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        others = "lengths/", "logits/", "loss", "grad_norm", "token_loss", "entropy"
        for metric, value in mine.items():
            if not metric.startswith(others):
                assert value == pytest.approx(theirs[metric], abs=1e-3), metric
        left_out = {each for each in theirs if each not in mine and each.startswith("rewards/")}
        assert left_out == {"rewards/rejected", "rewards/margins"} or not left_out


def test_a_step_does_not_depend_on_its_micro_batches(tiny, data, tmp_path):
    wanted = steps_of(train(tmp_path / "whole", fields(tiny, data)))
    assert wanted[-1]["kl"] > 0.1
    for name, cut in CUTS.items():
        assert_equal(steps_of(train(tmp_path / name, fields(tiny, data, batch=cut))), wanted)


def test_packs_train_as_their_answers_do(tiny, data, tmp_path):
    packed, alone = packed_and_alone(fields(tiny, data, max_steps=2), tmp_path)
    assert_equal(steps_of(packed), steps_of(alone))


def test_the_kl_is_over_the_answers_of_both_processes(tiny, data, run_of):
    """Held out are three answers, so that one process has two of them and the other one."""
    given = fields(tiny, data, eval_rows=3, batch={"micro_rows": 1}, max_steps=2)
    one, two = (run_of(each, fields=given) for each in ("single", "ddp"))
    for kind in ("train", "eval"):
        mine, theirs = (
            [(each["loss"], each["metrics"]["kl"]) for each in run.read_metrics(kind)]
            for run in (two, one)
        )
        for found, wanted in zip(mine, theirs, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-4)
    assert steps_of(one)[-1]["kl"] > 0.1


def test_a_resumed_run_uses_its_own_reference_numbers(tiny, data, tmp_path, monkeypatch):
    given = fields(tiny, data, saving={"every": 1}, eval_rows=4, evaluation={"every": 1})
    run = train(tmp_path / "run", given)
    straight = steps_of(run)
    (evaluated, *_) = run.read_metrics("eval")
    assert evaluated["metrics"]["kl"] >= 0
    for step in (2, 3):
        shutil.rmtree(run.checkpoint(step))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own-cache"))
    train(run.root, given, resume=True)
    assert steps_of(run) == straight
    assert not (tmp_path / "own-cache" / "reference").exists()
    with pytest.raises(FinetuneError, match="cannot be raised"):
        train(run.root, given | {"max_steps": 5}, resume=True)


def test_partners_are_other_answers_of_the_step():
    """Document n is the ids n, n, 100 + n, 200 + n, of which the last two are the answer."""
    trained = np.array([False, False, True, True])
    documents = documents_of((np.array([n, n, 100 + n, 200 + n]), trained) for n in range(9))
    rows = single_rows(documents)
    chosen = rows_of_step(1, 9, 4, seed=3)
    made = mismatched(rows, chosen, epoch=0, seed=3, max_length=4)
    of_each = [made.documents.document(number) for number in range(4)]
    assert all(answer.tolist() == trained.tolist() for _, answer in of_each)
    asked = [int(ids[0]) for ids, _ in of_each]
    assert asked == chosen.tolist()
    assert [int(ids[2]) - 100 for ids, _ in of_each] == [asked[-1], *asked[:-1]]
    order = np.array([2, 0, 1, 3, 4, 5, 6, 7, 8])
    packed = Rows(documents, order, np.array([0, 3, 9]), packed=True)
    of_packs = mismatched(packed, np.array([1, 0, 1]), epoch=0, seed=3, max_length=4)
    of_rows = mismatched(rows, np.arange(9), epoch=0, seed=3, max_length=4)
    assert np.array_equal(of_packs.documents.ids, of_rows.documents.ids)
    assert len(mismatched(rows, chosen, 0, 3, max_length=2)) == 0
    assert len(mismatched(rows, np.array([4, 4]), 0, 3, max_length=4)) == 0


def test_pairs_are_two_judged_answers(tiny, tmp_path):
    source = written(tmp_path / "pairs.jsonl", pairs(6))
    recipe = ft.KTO(ft.Model(str(tiny.model))).with_data(ft.Data(str(source), "preference"))
    found = inspect(recipe, rows=12)
    assert (found.counts["train"]["documents"], found.counts["train"]["wanted"]) == (12, 6)
    assert sorted(document.name for (document,) in found.rows) == ["unwanted"] * 6 + ["wanted"] * 6
    assert not found.mistakes


def test_labels_of_one_side_are_a_mistake_and_uneven_ones_a_note(tiny, data, tmp_path):
    recipe = catalog.from_fields(fields(tiny, data))
    assert inspect(recipe).notes == [
        "desirable_weight: 16 wanted and 8 unwanted answers weigh 2.00 to 1, and 1 to 1.33 is "
        "usual: set desirable_weight to 0.50 up to 0.67, or undesirable_weight to 1.50 up to 2.00"
    ]
    rows = [row for row in map(json.loads, data.read_text().splitlines()) if row["label"]]
    one_side = written(tmp_path / "wanted.jsonl", rows)
    counts = inspect(recipe.with_data(ft.Data(str(one_side), "kto"))).counts["train"]
    assert list(mistakes(counts)) == [
        "data: each of the 16 answers is labelled as wanted, so there is nothing to compare them "
        "with; check the column of labels; if this is intended, set data_checks=report"
    ]


def test_a_step_whose_answers_are_all_wanted_is_taken(tiny, data, tmp_path):
    """It has no measures of unwanted answers, and is as finite as the others."""
    rows = [json.loads(line) for line in data.read_text().splitlines()][:6]
    source = written(tmp_path / "few.jsonl", (r | {"label": n > 0} for n, r in enumerate(rows)))
    run = train(tmp_path / "run", fields(tiny, source, batch={"rows": 2, "micro_rows": 1}))
    found = list(run.read_metrics("train"))
    for name in ("rewards/rejected", "rewards/margins"):
        assert sum(name in each["metrics"] for each in found) == 1
    answers = [row[0] for row in sequences(tiny)[:6]]
    sums = [answer_sums(plain(tiny), *answer) for answer in answers]
    both = rows_of_step(0, 6, 2, 0)
    for metric, place, of_step in (("logits/chosen", 1, both[both > 0]), ("entropy", 2, both)):
        tokens = sum(len(answers[row][0]) - answers[row][1] for row in of_step)
        wanted = sum(sums[row][place] for row in of_step) / tokens
        assert found[0]["metrics"][metric] == pytest.approx(wanted, rel=1e-5)
    for each in found:
        assert each["metrics"].keys() >= {"logits/chosen"}
        assert ("logits/rejected" in each["metrics"]) == ("rewards/rejected" in each["metrics"])
        assert np.isfinite([each["loss"], each["grad_norm"], *each["metrics"].values()]).all()
        assert each["grad_norm"] > 0


def test_a_step_of_one_answer_and_pieces_of_answers_are_refused():
    with pytest.raises(FinetuneError, match="a step of one answer has no other prompt"):
        ft.KTO(batch=ft.Batch(rows=1))
    notes = ft.KTO().with_batch(rows=4).advice()
    assert any(note.startswith("batch.rows: 4 answers") for note in notes)
    recipe = ft.KTO(ft.Model("m")).with_data(ft.Data("a.jsonl", "kto")).with_batch(overlong="split")
    with pytest.raises(FinetuneError, match="kto learns from the label of a whole answer"):
        ft.plan(recipe, "single")


def test_a_plan_has_the_time_of_the_reference_and_of_the_kl():
    """With frozen weights a step is two passes forward and back; the KL is one more forward."""
    common: dict[str, Any] = {"model": ft.Model("Qwen/Qwen3-0.6B"), "epochs": 2}

    def planned(recipe: ft.Recipe) -> ft.Prediction:
        data = recipe.with_data(ft.Data("my/rows", "preference")).with_lora(8)
        return ft.plan(data.with_batch(rows=32, micro_rows=8), gpu="H100-80", rows=3200)

    kto, dpo, orpo = (planned(kind(**common)) for kind in (ft.KTO, ft.DPO, ft.ORPO))
    assert (kto.steps, dpo.steps, orpo.steps) == (200, 200, 200)
    assert orpo.reference_seconds is None
    assert dpo.reference_seconds == pytest.approx(100 * dpo.times.step / 2)
    assert dpo.seconds == pytest.approx(250 * dpo.times.step)
    assert dpo.workload.rows == 2 * kto.workload.rows == 16
    assert dpo.times.flops / 2 == pytest.approx(kto.times.flops)
    assert kto.times.scoring == pytest.approx(kto.times.step / 3)
    assert kto.reference_seconds == pytest.approx(300 * kto.times.step / 3)
    assert "of them for the reference)" in dpo.page()
