"""`finetune compare` shows what differs between runs, and what they reached."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import written
from records import RECIPE, evaluated, trained, whole_run, write_run

from finetune import Run
from finetune.cli import main as cli
from finetune.reports.comparison import compare, page
from finetune.runs.metrics import Evaluated
from finetune.runs.run import write_json


def measures(exact: float) -> dict[str, Any]:
    interval = [exact - 0.25, exact + 0.25]
    found: dict[str, Any] = {
        "exact": {"after": exact, "after_interval": interval, "unit": "share"},
        "loss": {"after": 0.5, "after_interval": None, "unit": "nats"},
    }
    return {"rows": {"digest": "same"}, "measures": found, "primary": "exact"}


def answer(prompt: str, right: bool) -> dict[str, Any]:
    score = {"exact": {"after": float(right)}}
    return {"prompt": prompt, "expected": "4", "after": "4" if right else "5", "scores": score}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Two runs that differ in their rate and rank, their last evaluation and their answers."""
    monkeypatch.chdir(tmp_path)
    records = [whole_run(), whole_run()]
    last = max(n for n, each in enumerate(records[1]) if isinstance(each, Evaluated))
    records[1][last] = evaluated(records[1][last].step, 0.25, best=True)
    found = list[Run]()
    for name, record, exact in (("one", records[0], 0.5), ("two", records[1], 0.75)):
        run = write_run(tmp_path / name, record)
        changes = {"optim": RECIPE["optim"] | {"lr": 1e-3}, "adapter": None}
        write_json(run.recipe, RECIPE | (changes if name == "two" else {}))
        write_json(run.evaluations / "held-out" / "results.json", measures(exact))
        found.append(run)
    return found


def test_runs_are_compared_side_by_side_and_answers_to_other_rows_are_marked(
    runs, tmp_path, capsys
):
    assert cli.main(["compare", *(str(run.root) for run in runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines]
    assert table[0] == ["Recipes:", "differences", "one", "two"]
    assert table[1:4] == [
        ["adapter.r", "16", "-"],
        ["adapter.targets", "all-linear", "-"],
        ["optim.lr", "0.0002", "0.001"],
    ]
    assert next(r for r in table if r[:2] == ["best", "eval"])[-1] == "0.2500"
    assert "exact 50.0% (25.0% to 75.0%) 75.0% (50.0% to 100.0%)".split() in table
    assert lines[-1] == "page       comparison.html"
    page = (tmp_path / "comparison.html").read_text()
    for look in ("smooth colour-0", "smooth colour-1", "dots colour-0", "dots colour-1"):
        assert f'<polyline class="{look}"' in page
    assert "other rows" not in page
    path = runs[1].evaluations / "held-out" / "results.json"
    write_json(path, json.loads(path.read_text()) | {"rows": {"digest": "another"}})
    assert cli.main(["compare", *(str(run.root) for run in runs)]) == 0
    assert "Evaluation held-out, on different rows" in capsys.readouterr().out


def test_answers_stand_side_by_side_and_what_was_lost_comes_first(runs):
    right = {"one": {"2+2", "1+3"}, "two": {"2+2", "3+1"}}
    for run in runs:
        rows = [answer(p, p in right[run.root.name]) for p in ("3+1", "2+2", "1+3")]
        written(run.evaluations / "held-out" / "samples.jsonl", rows)
    found = compare([run.root for run in runs])
    assert [each["prompt"] for each in found["answers"]] == ["1+3", "2+2", "3+1"]
    assert [each["right"] for each in found["answers"][0]["answers"]] == [True, False]
    shown = page(found)
    assert shown.index("1+3") < shown.index("3+1")


def test_other_data_and_versions_are_named(runs):
    for run, rows, torch in ((runs[0], 10, "2.13"), (runs[1], 12, "2.14")):
        write_json(run.data, {"train": {"rows": rows, "tokens": 7}})
        write_json(run.environment, {"python": "3.11", "versions": {"torch": torch}})
    (table,) = [t for t in compare([run.root for run in runs])["tables"] if "Data" in t.heading]
    assert table.rows == [["data.train.rows", "10", "12"], ["versions.torch", "2.13", "2.14"]]


def test_rewards_of_online_runs_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = whole_run()[0]
    for name, rewards in (("one", (0.125, 0.25)), ("two", (0.5, 0.0)), ("tuned", ())):
        steps = [trained(n, metrics={"reward": each}) for n, each in enumerate(rewards, 1)]
        write_run(tmp_path / name, [start, *(steps or (trained(1), trained(2)))])
    assert cli.main(["compare", "one", "two", "tuned"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["training", "reward", "0.2500", "0.0000", "-"] in table
    assert "training reward" in (tmp_path / "comparison.html").read_text()
    assert cli.main(["compare", "tuned", "tuned/../two"]) == 0
    assert ["training", "reward", "-", "0.0000"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_what_cannot_be_compared_is_named(runs, tmp_path, capsys):
    one = str(runs[0].root)
    for words, told in (
        ([one], "compare: got 1 runs, expected 2 to 8"),
        ([one, one], "compare: one run is named twice"),
        ([one, str(tmp_path / "none")], "not a run directory"),
    ):
        assert cli.main(["compare", *words]) == 2
        assert told in capsys.readouterr().err
    runs[1].metrics.write_text('{"kind": "eval", "step": "x"}\n')
    assert cli.main(["compare", one, str(runs[1].root)]) == 2
    assert str(runs[1].metrics) in capsys.readouterr().err
    assert not (tmp_path / "comparison.html").exists()
