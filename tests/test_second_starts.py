"""A second start has what the first one left, and nothing that another recipe left in the cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, Tiny, Train, copy_of, equal_state, losses, write_recipe
from preference import pairs
from small_tokenizer import small_tokenizer

import finetune as ft
from finetune.data.chat.render import load_chat
from finetune.data.prepare import Prepared, prepare
from finetune.runs.run import Run


def cut(run: Run, step: int) -> Run:
    """The run as a kill right after the checkpoint of a step leaves it."""
    shutil.rmtree(run.final)
    for later in run.steps():
        if later > step:
            shutil.rmtree(run.checkpoint(later))
    return run


def test_patience_goes_on_counting_where_it_was(train: Train) -> None:
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
    cut(run, best + 3)
    train("run", resume=True, **sections)
    assert losses(run, "eval") == straight
    assert [record["reason"] for record in run.read_metrics("end")] == ["early stop"]
    assert run.best_step() == best


# The cache.


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
def test_a_reference_in_another_storage_is_computed_anew(
    train: Train, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A policy at its start is its own reference, so that each answer is rewarded with zero."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in pairs()))

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


# Several processes.


def test_both_moments_of_zero2_are_there_after_a_resume(
    run_of: Train, tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    straight = run_of("zero2")
    resumed = cut(copy_of(straight, tmp_path / "run"), 3)
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    done = finetune(
        "launch", recipe, "--processes", "2", "--backend", "zero2", "--precision", "fp32",
        "--output", resumed.root, "--resume",
    )  # fmt: skip
    assert done.status == 0, done.output
    assert losses(resumed) == losses(straight)
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))
