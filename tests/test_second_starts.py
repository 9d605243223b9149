"""A second start has what the first one left, and nothing that another recipe left in the cache."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Train, cut_off, losses, written
from preference import pairs
from small_tokenizer import small_tokenizer

import finetune as ft
from finetune.data.chat.render import load_chat
from finetune.data.prepare import Prepared, prepare


def test_patience_goes_on_counting_where_it_was(train: Train, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "optim": {"lr": 0.3, "warmup": 0, "schedule": "constant"},  # gets worse from step 2 on
        "evaluation": {"every": 1, "patience": 4},
        "saving": {"every": 1, "keep": 2},
        "max_steps": 20,
    }
    run = train("run", **sections)
    straight, best = losses(run, "eval"), run.best_step()
    assert best == straight.index(min(straight)) + 1
    assert len(straight) == best + 4
    assert run.steps() == [best, best + 3, best + 4]
    cut_off(run, tmp_path / "cut", best + 3)
    resumed = train("cut", resume=True, **sections)
    assert losses(resumed, "eval") == straight
    assert [record["reason"] for record in resumed.read_metrics("end")] == ["early stop"]
    assert resumed.best_step() == best


def test_rows_of_other_template_variables_are_others(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "What?", "answer": "This."}) + "\n")
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{{ tone }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{{ tone }}: {% endif %}"
    )
    recipe = ft.SFT().with_data(ft.Data(str(source), "question_answer"))

    def prepared(tone: str) -> tuple[Path, str]:
        chat = load_chat(small_tokenizer(), str(template), {"tone": tone})
        found: Prepared = prepare(recipe, chat, tmp_path / "cache")
        return found.folder, chat.tokenizer.decode(found.train.row(0)[0])

    first, second = prepared("!"), prepared("?")
    assert "user!: What?" in first[1]
    assert "user?: What?" in second[1]
    assert prepared("!") == first
    assert first[0] != second[0]


@pytest.mark.parametrize("first", ["nf4", "none"])
def test_a_reference_in_another_storage_is_computed_anew(train, tiny, tmp_path, monkeypatch, first):
    """A policy at its start is its own reference, so that each answer is rewarded with zero."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    source = written(tmp_path / "pairs.jsonl", pairs())

    def rewards(storage: str) -> tuple[float, float]:
        fields = tiny.fields(
            model={"quantization": storage},
            data=[{"source": str(source), "format": "preference"}],
            method="dpo",
            adapter={"r": 4},
            max_steps=1,
        )
        del fields["eval_data"], fields["evaluation"]
        (step,) = train(storage, fields=fields).read_metrics("train")
        return step["metrics"]["rewards/chosen"], step["metrics"]["rewards/rejected"]

    assert rewards(first) == pytest.approx((0, 0), abs=1e-6)
    assert rewards("none" if first == "nf4" else "nf4") == pytest.approx((0, 0), abs=1e-6)
