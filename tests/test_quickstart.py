"""The first thing that a new user does: one command, a table, and the commands that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import Finetune
from safetensors import safe_open

pytestmark = pytest.mark.slow


def test_the_quickstart_teaches_what_the_base_fails_and_its_next_commands_work(
    finetune: Finetune, tmp_path: Path
):
    finished = finetune("quickstart", cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    (run,) = (tmp_path / "runs").iterdir()
    samples = json.loads((run / "samples.json").read_text())
    assert len(samples) == 200
    before = sum(row["before"] == row["expected"] for row in samples) / len(samples)
    after = sum(row["after"] == row["expected"] for row in samples) / len(samples)
    assert before < 0.05
    assert after > 0.90
    shown = re.sub(r"\s+", " ", finished.stdout)
    assert f"{before:.1%} of 200 held-out rows" in shown
    assert f"{after:.1%} of 200 held-out rows" in shown
    assert "tokens/s" in shown
    assert "peak memory" in shown
    assert f"runs/{run.name}" in shown

    train = [json.loads(line) for line in (tmp_path / "quickstart/data/train.jsonl").open()]
    held_out = [json.loads(line) for line in (tmp_path / "quickstart/data/held_out.jsonl").open()]
    assert len(train) >= 2_000
    assert len(held_out) == 200
    seen = {row["messages"][0]["content"] for row in train}
    assert not seen & {row["messages"][0]["content"] for row in held_out}

    named = [shlex.split(words) for words in re.findall(r"next: \S*finetune (.*)", finished.stdout)]
    assert [words[0] for words in named] == ["chat", "report", "export"]
    (chat, report, export) = named
    question = samples[0]["prompt"]
    answered = finetune(*chat, "--prompt", question, cwd=tmp_path)
    assert answered.status == 0, answered.stderr
    assert answered.stdout.strip() == samples[0]["after"]
    assert "Loading" not in answered.stderr
    assert finetune(*report, cwd=tmp_path).status == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert finetune(*export, cwd=tmp_path).status == 0
    with safe_open(tmp_path / "merged/model.safetensors", "pt") as file:
        assert all(0 not in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
