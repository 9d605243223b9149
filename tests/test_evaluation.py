"""`finetune eval` asks runs, folders and base models every held-out row, and shows the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import save_base, start_run, tiny_llama

import finetune as ft
from finetune import catalog
from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.evaluation.questions import of_run, spread
from finetune.exporters.huggingface import export
from finetune.runs.run import Run, write_json

QUESTIONS = [f"question {number}" for number in range(8)]


def write_rows(path: Path, questions: list[str], answer: str = "ok.") -> Path:
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer}]}
        for q in questions
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that learnt to say "ok.", with three rows held out of two files."""
    tmp = tmp_path_factory.mktemp("evaluated")
    base = save_base(tiny_llama(), tmp / "base")
    files = [
        write_rows(tmp / f"{name}.jsonl", part)
        for name, part in (("one", QUESTIONS[:4]), ("two", QUESTIONS[4:]))
    ]
    recipe = catalog.from_fields({
        "method": "sft",
        "model": {"name": str(base)},
        "data": [{"source": str(file), "format": "messages"} for file in files],
        "eval_rows": 3,
        "batch": {"rows": 2, "micro_rows": 1, "max_length": 64},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup": 0},
        "max_steps": 30,
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(tmp / "cache"))
        return ft.train(recipe, precision="fp32", output=tmp / "run")


@pytest.fixture(autouse=True)
def place(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(run.root.parent / "cache"))
    monkeypatch.chdir(tmp_path)


def evaluate(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert cli.main(["eval", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_run_is_asked_the_rows_that_it_held_out(run, capsys):
    held_out = of_run(run)
    assert len({asked.place for asked in held_out}) == 3
    lines = evaluate(capsys, run.root).splitlines()
    assert lines[0] == "exact match 100.0%: 3 of 3 rows"
    assert [line for line in lines if line.startswith("right (")] == [
        f"right ({asked.place})" for asked in held_out
    ]
    assert lines.count("  answer   ok.") == lines.count("  expected ok.") == 3
    path = run.root / "answers.jsonl"
    assert lines[-1] == f"samples    {path}"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(s["prompt"], s["answer"], s["matched"], s["cut"]) for s in samples] == [
        (asked.question.messages[0]["content"], "ok.", True, False) for asked in held_out
    ]


def test_a_folder_and_the_base_are_asked_the_same_rows(run, capsys, tmp_path):
    export(run, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    words = ("--rows-of", run.root, "--json")
    found = json.loads(evaluate(capsys, tmp_path / "out", *words))
    assert (found["matched"], found["rows"], found["of"], found["cut"]) == (3, 3, 3, 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    assert Path(found["samples"]).is_file()
    base = json.loads(evaluate(capsys, run.root.parent / "base", *words, "--max-new-tokens", "4"))
    assert [e["prompt"] for e in base["examples"]] == [e["prompt"] for e in found["examples"]]
    assert base["matched"] == 0


def test_answers_that_the_limit_cut_are_counted(run, capsys):
    lines = evaluate(capsys, run.root, "--max-new-tokens", "2").splitlines()
    assert lines[0] == "exact match 0.0%: 0 of 3 rows"  # then those of each file
    assert lines[3] == (
        "cut        3 answers were not complete after 2 tokens or the model's context "
        "(--max-new-tokens)"
    )
    assert lines.count("  answer   ok [cut]") == 3


def test_every_source_of_eval_data_is_asked(run, capsys, tmp_path):
    fields: dict[str, Any] = json.loads(run.recipe.read_text())
    right = write_rows(tmp_path / "right.jsonl", QUESTIONS[:4])
    wrong = write_rows(tmp_path / "wrong.jsonl", QUESTIONS[4:], "no.")
    sources = [{"source": str(file), "format": "messages"} for file in (right, wrong)]
    other = Run(tmp_path / "other")
    write_json(other.recipe, fields | {"eval_rows": None, "eval_data": sources})
    lines = evaluate(capsys, run.final, "--rows-of", other.root, "--limit", "4").splitlines()
    assert lines[:3] == [
        "exact match 50.0%: 2 of 4 rows of 8, evenly spaced (--limit)",
        f"  100.0%: 2 of 2 rows of {right}",
        f"  0.0%: 0 of 2 rows of {wrong}",
    ]
    assert lines[3].startswith(f"wrong ({wrong} row ")


def test_a_limit_takes_rows_of_the_whole_length():
    assert spread(list("abcdefgh"), 4) == list("aceg")
    assert spread(list("abc"), 4) == list("abc")


def test_other_data_than_the_run_had_is_refused(run, tmp_path):
    fields = json.loads(run.recipe.read_text())
    other = write_rows(tmp_path / "one.jsonl", ["something else", *QUESTIONS[:4]])
    fields["data"][0]["source"] = str(other)
    kept = run.recipe.read_text()
    write_json(run.recipe, fields)
    try:
        with pytest.raises(FinetuneError, match="the data is not that of the run"):
            of_run(run)
    finally:
        run.recipe.write_text(kept)


def test_a_run_without_held_out_rows_says_what_to_give(tmp_path):
    empty = start_run(tmp_path / "run", None)
    with pytest.raises(FinetuneError, match="no eval_data and no eval_rows; give --data and"):
        of_run(empty)
