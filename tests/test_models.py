"""The table of architectures says what is measured, and nothing in it is wrong."""

import os
import re
import subprocess

import pytest
from conftest import ROOT

from benchmarks.models import ARCHITECTURES, BEGIN, COLUMNS, END, measure, table

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TABLE = PAGE.partition(BEGIN)[2].partition(END)[0].strip()


def cells(text: str) -> dict[str, tuple[str, ...]]:
    """Answers by architecture, in the order of the columns."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", text, re.M)
    return {name: tuple(cell.strip() for cell in answers.split("|")) for name, answers in rows}


def test_the_table_has_every_architecture_and_each_answer_is_right_or_has_a_reason():
    found = cells(TABLE)
    assert list(found) == list(ARCHITECTURES)
    for name, answers in found.items():
        assert len(answers) == len(COLUMNS)
        assert set(answers) <= {"right", "refused", "padded", ""}
        for column, answer in zip(COLUMNS, answers, strict=True):
            if answer in ("refused", "padded"):
                assert re.search(rf"^- `{name}`, [^:]*\b{column}\b[^:]*: \S", TABLE, re.M), column


@pytest.mark.slow
def test_the_table_is_what_is_measured(tmp_path, monkeypatch):
    """A sixteenth of it, another one for each commit: all of it takes minutes.

    MODELS=all measures the whole, as does `python -m benchmarks models`.
    """
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    names = tuple(ARCHITECTURES)
    if os.environ.get("MODELS") != "all":
        commits = subprocess.run(
            ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        names = names[int(commits.stdout or 0) % 16 :: 16]
    shown = {name: answers for name, answers in cells(TABLE).items() if name in names}
    assert cells(table(measure(tmp_path, names))) == shown
