"""The first thing that a new user does: one command, a table, and the commands that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import Finetune
from quickstarted import quickstarted
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from finetune import Run, TrainingFailure
from finetune.quickstart.supervised import refuse_miss

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(shared: Path, finetune: Finetune) -> Path:
    """All quickstarts use the base that the first of them trains."""
    return quickstarted(shared, finetune)


def test_the_quickstart_teaches_what_the_base_fails_and_its_next_commands_work(finetune, folder):
    said, run = (folder / "said").read_text(), folder / "runs" / "quickstart"
    samples = json.loads((run / "samples.json").read_text())
    assert len(samples) == 200
    before = sum(row["before"] == row["expected"] for row in samples) / len(samples)
    after = sum(row["after"] == row["expected"] for row in samples) / len(samples)
    assert before < 0.05
    assert after > 0.90
    shown = re.sub(r"\s+", " ", said)
    assert f"{before:.1%} of 200 held-out rows" in shown
    assert f"{after:.1%} of 200 held-out rows" in shown
    assert all(each in shown for each in ("tokens/s", "peak memory", "runs/quickstart"))
    train, held_out = (
        [json.loads(line) for line in (folder / f"quickstart/data/{name}.jsonl").open()]
        for name in ("train", "held_out")
    )
    assert len(train) >= 2_000
    assert len(held_out) == 200
    seen = {row["messages"][0]["content"] for row in train}
    assert not seen & {row["messages"][0]["content"] for row in held_out}
    named = [shlex.split(words) for words in re.findall(r"next: \S*finetune (.*)", said)]
    assert [words[0] for words in named] == ["eval", "chat", "report", "export", "board"]
    measure, chat, report, export, (_, shown_run) = named
    assert (folder / shown_run / "recipe.json").is_file()
    measured = finetune(*measure, "--limit", "20", "--json", cwd=folder).passed()
    exact = json.loads(measured.stdout)["measures"]["exact"]
    assert exact["before"] < 0.1
    assert exact["after"] > 0.8
    answered = finetune(*chat, "--prompt", samples[0]["prompt"], cwd=folder).passed()
    assert answered.stdout.strip() == samples[0]["after"]
    assert "Loading" not in answered.stderr
    assert finetune(*report, cwd=folder).status == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert finetune(*export, cwd=folder).status == 0
    with safe_open(folder / "merged/model.safetensors", "pt") as file:
        assert all(0 not in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118


def test_the_quickstart_of_rewards_learns_what_is_rewarded_and_nothing_else(finetune, folder):
    """On the base that the first quickstart trained."""
    finished = finetune("quickstart", "--method", "grpo", cwd=folder).passed()
    before, after, rewards = (
        [float(number) for number in re.findall(r"\d+\.\d+", line)]
        for words in ("of 200 before", "match after", "last samples")
        for line in finished.stdout.splitlines()
        if words in line
    )
    assert before[0] == before[1] < 1
    assert after[0] > 95
    assert after[1] < 1
    assert rewards[1] > 0.9
    run, hacked = (Run(folder / f"runs/quickstart-grpo{kind}") for kind in ("", "-hacked"))
    assert 0.02 < next(run.read_metrics("train"))["metrics"]["reward"] < 0.4
    page = hacked.report.read_text()
    assert "Sampled completions" in page
    assert "exact_match" in page


def test_a_quickstart_that_misses_its_goal_fails_and_names_its_starting_models(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, step, loss in (("base", 700, 0.91), ("start", 60, 0.4567)):
        run = Run(Path("quickstart") / name)
        run.root.mkdir(parents=True)
        records = [{"kind": "train", "step": n, "loss": loss} for n in (1, step)]
        run.metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
    refuse_miss("grpo", "exact match", 0.8)
    with pytest.raises(TrainingFailure) as caught:
        refuse_miss("grpo", "exact match", 0.004)
    assert caught.value.problems == (
        "quickstart --method grpo: exact match is 0.4% after training, expected at least 80%. It "
        "learns only from answers that its starting model can already give (quickstart/base ended "
        "at step 700, loss 0.910; quickstart/start ended at step 60, loss 0.457): delete "
        "quickstart/base and quickstart/start to train both again, choose another --output, and "
        "repeat it",
    )


def test_the_quickstart_of_preferences_changes_the_answers_and_keeps_them_valid(finetune, folder):
    finished = finetune("quickstart", "--method", "dpo", cwd=folder).passed()
    shown = re.findall(
        r"(preferred answers|valid records)\D+([\d.]+)%\D+([\d.]+)%", finished.stdout
    )
    shares = {name: (float(before), float(after)) for name, before, after in shown}
    assert shares["preferred answers"][0] < 5
    assert min(shares["preferred answers"][1], *shares["valid records"]) > 95
    run = folder / "runs/quickstart-dpo"
    question = "For Marta in Turin: half a dozen mugs, due on Monday."
    answered = finetune("chat", run, "--prompt", question, cwd=folder)
    assert list(json.loads(answered.stdout)) == ["city", "count", "day", "item", "name"]
    finetune("export", run, "--to", folder / "preferred", cwd=folder).passed()
    assert "rewards/margins" in (folder / "preferred/README.md").read_text()


def test_the_quickstart_of_pictures_teaches_colours_and_its_next_commands_work(tmp_path, finetune):
    """On a base of random weights, which it draws itself."""
    done = finetune("quickstart", "--method", "images", cwd=tmp_path).passed()
    run = tmp_path / "runs/quickstart-images"
    samples = json.loads((run / "samples.json").read_text())
    shares = [
        sum(row[side] == row["expected"] for row in samples) / len(samples)
        for side in ("before", "after")
    ]
    assert (len(samples), shares[0]) == (200, 0)
    assert shares[1] > 0.95
    page = (run / "report.html").read_text()
    assert page.count('<img src="data:image/png') == 50
    named = [shlex.split(words) for words in re.findall(r"next: \S*finetune (.*)", done.stdout)]
    chat, measure, serve, export = named
    answered = finetune(*chat, cwd=tmp_path).passed()
    assert answered.stdout.strip() == samples[0]["after"]
    measured = json.loads(finetune(*measure, "--json", cwd=tmp_path).passed().stdout)
    exact = measured["measures"]["exact"]
    assert (exact["before"], exact["after"]) == tuple(shares)
    finetune(*export, cwd=tmp_path).passed()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "seeing", backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "seeing")
    assert processor.merge_size == model.config.vision_config.spatial_merge_size
    assert serve[0] == "serve"
