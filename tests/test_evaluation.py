"""`finetune eval` measures runs, folders and servers on held-out rows, beside others."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import copy_of
from peft import LoraConfig, get_peft_model
from preference import written as write_lines
from tiny_run import SIZES, save_base, start_run, tiny_llama
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import finetune as ft
from finetune import FinetuneError, Options, Run, catalog, export, load, load_base
from finetune.cli import main as cli
from finetune.evaluation.contamination import Overlap, overlap
from finetune.evaluation.open_model import can_switch_off
from finetune.evaluation.questions import of_run, of_source, spread
from finetune.runs.run import write_json

QUESTIONS = [f"question {number}" for number in range(8)]


def write_rows(path: Path, questions: list[str], answer: str = "ok.") -> Path:
    said = {"role": "assistant", "content": answer}
    asked = [{"role": "user", "content": each} for each in questions]
    return write_lines(path, ({"messages": [each, said]} for each in asked))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An adapter that learnt to say "ok.", with three rows held out of two files."""
    tmp = tmp_path_factory.mktemp("evaluated")
    base = save_base(tiny_llama(), tmp / "base")
    parts = {"one": QUESTIONS[:4], "two": QUESTIONS[4:]}
    files = [write_rows(tmp / f"{name}.jsonl", part) for name, part in parts.items()]
    recipe = catalog.from_fields({
        "method": "sft", "model": {"name": str(base)}, "adapter": {"r": 8},
        "data": [{"source": str(file), "format": "messages"} for file in files],
        "batch": {"rows": 2, "micro_rows": 1, "max_length": 64}, "eval_rows": 3,
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup": 0}, "max_steps": 30,
    })  # fmt: skip
    return ft.train(recipe, precision="fp32", options=Options(tmp / "run", plot=False))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluate(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    assert cli.main(["eval", *map(str, words)]) == status
    read = capsys.readouterr()
    return read.out if status < 2 else read.err


def measured(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    return json.loads(evaluate(capsys, *words, "--json"))


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_and_its_base_are_asked_the_rows_that_were_held_out(run, capsys):
    held_out = of_run(run)
    assert len({asked.place for asked in held_out}) == 3
    words = ("--max-new-tokens", "8", "--require", "exact>=0.4,forgetting<=0.1")
    lines = evaluate(capsys, run.root, *words, status=1).splitlines()
    assert lines[0] == f"{run.root.name} against its base: 3 of 3 rows answered, loss of 3 rows"
    assert lines[1].split() == ["before", "after", "difference", "95%", "interval"]
    exact = next(line for line in lines if line.startswith("exact "))
    assert exact.split()[1:4] == ["0.0%", "100.0%", "+100.0"]
    assert [line for line in lines if line.startswith("got better (")] == [
        f"got better ({Path(asked.place).name})" for asked in held_out
    ]
    assert lines.count("  after    ok.") == lines.count("  expected ok.") == 3
    assert lines[-3].startswith("passed     exact>=0.4: 1, 95 % interval 0.4385 to 1, 3 rows")
    assert lines[-2].startswith("FAILED     forgetting<=0.1: ")
    folder = run.root / "eval" / "held-out"
    assert lines[-1] == f"page       {folder / 'index.html'}"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html", "results.json", "samples.jsonl",
    ]  # fmt: skip
    assert [(s["prompt"], s["after"], s["change"], s["after_finish"]) for s in samples(folder)] == [
        (asked.question.messages[0]["content"], "ok.", "got better", "stop") for asked in held_out
    ]
    results = json.loads((folder / "results.json").read_text())
    (trained,) = run.read_metrics("eval")
    loss = results["measures"]["loss"]
    # Sums of fp32 in another order: four tokens a row, each to 1e-7 of its logits.
    assert loss["after"] == pytest.approx(trained["loss"], rel=1e-3)
    assert loss["difference"] == loss["after"] - loss["before"]
    assert loss["difference_interval"][1] < 0
    assert results["rows"]["also_trained"] == {"rows": 0, "prompts": 0, "first": ""}
    page = (folder / "index.html").read_text()
    assert page.count('<div class="sample">') == 3
    assert "<del>ok.</del>" in page


def test_an_adapter_that_is_switched_off_is_the_base_bit_for_bit(run):
    tuned = load(run)
    base = load_base(catalog.load(run.recipe), tuned.tokenizer)
    ids = base.model.dummy_inputs["input_ids"]
    with tuned.model.disable_adapter():
        assert tuned.model(ids).logits.equal(base.model(ids).logits)
    assert not tuned.model(ids).logits.equal(base.model(ids).logits)


def test_folders_and_the_base_are_measured_on_the_same_rows(run, capsys, tmp_path):
    after = measured(capsys, run.root, "--max-new-tokens", "8")["measures"]
    words = ("--rows-of", run.root, "--max-new-tokens", "8")
    adapter = export(run, tmp_path / "adapter")
    before = sorted(path.name for path in adapter.iterdir())
    same = measured(capsys, adapter, *words)
    assert (same["against"]["kind"], same["measures"]) == ("base", after)
    assert sorted(path.name for path in adapter.iterdir()) == before
    merged = export(run, tmp_path / "merged", merge=True)
    whole = measured(capsys, merged, *words, "--against", run.root.parent / "base")["measures"]
    assert (whole["exact"], whole["loss"]["before"]) == (after["exact"], after["loss"]["before"])
    base = measured(capsys, run.root.parent / "base", *words, "--against", run.root)["measures"]
    assert base["exact"]["difference"] == -after["exact"]["difference"]
    assert (tmp_path / "eval").is_dir()


def test_an_adapter_that_changed_its_base_is_not_switched_off(run, tmp_path):
    assert can_switch_off(load(run))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights="pissa")
    changed = get_peft_model(tiny_llama(), config)
    assert not can_switch_off(dataclasses.replace(load(run), model=changed))


def test_a_run_of_preferences_has_the_rewards_of_its_training(run, capsys, tmp_path):
    pairs = [{"prompt": q, "chosen": f"ok {q}", "rejected": "no, never"} for q in QUESTIONS]
    data = [{"source": str(write_lines(tmp_path / "pairs.jsonl", pairs)), "format": "preference"}]
    recipe = catalog.from_fields({
        "method": "dpo",
        "model": {"name": str(run.root.parent / "base")},
        "adapter": {"r": 4},
        **{"data": data, "eval_data": data, "optim": {"lr": 1e-3}, "max_steps": 4},
        "batch": {"rows": 4, "micro_rows": 2, "max_length": 64},
    })  # fmt: skip
    trained = ft.train(recipe, precision="fp32", options=Options(tmp_path / "dpo", plot=False))
    (record,) = trained.read_metrics("eval")
    capsys.readouterr()
    found = measured(capsys, trained.root, "--max-new-tokens", "4")
    measures, rewards = found["measures"], record["metrics"]
    assert measures["reward_accuracy"]["after"] == rewards["rewards/accuracies"]
    # Sums over some ten tokens of fp32 log-probabilities.
    margin = measures["reward_margin"]["after"] * recipe.beta
    assert margin == pytest.approx(rewards["rewards/margins"], abs=1e-4)
    assert measures["preference"]["after"] >= measures["preference"]["before"]
    assert found["rows"]["also_trained"]["rows"] == len(pairs)


def test_answers_that_a_limit_cut_are_counted_and_a_limit_of_rows_is_spread(run, capsys):
    lines = evaluate(capsys, run.root, "--max-new-tokens", "2", "--against", "none").splitlines()
    assert lines[1].split() == ["value", "95%", "interval"]
    assert [line.split()[-1] for line in lines if line.startswith("cut by the limit")] == ["3"]
    assert lines.count("  answer   ok [cut]") == 3
    assert spread(list("abcdefgh"), 4) == list("aceg")  # a limit takes rows of the whole length
    assert spread(list("abc"), 4) == list("abc")


def other_run(folder: Path, method: str, source: Path, format: str, **fields: Any) -> Run:
    """The recipe of another run, on these rows."""
    run = Run(folder)
    data = [{"source": str(source), "format": format}]
    write_json(run.recipe, {"method": method, "data": data, **fields})
    return run


def test_every_source_of_eval_data_is_asked_and_trained_rows_are_counted(run, capsys, tmp_path):
    fields: dict[str, Any] = json.loads(run.recipe.read_text())
    right = write_rows(tmp_path / "right.jsonl", QUESTIONS[:4])
    wrong = write_rows(tmp_path / "wrong.jsonl", [*QUESTIONS[4:6], "new", "newer"], "no.")
    sources = [{"source": str(file), "format": "messages"} for file in (right, wrong)]
    other = Run(tmp_path / "other")
    write_json(other.recipe, fields | {"eval_rows": None, "eval_data": sources})
    found = measured(capsys, run.final, "--rows-of", other.root, "--limit", "4")
    assert (found["rows"]["answered"], found["rows"]["of"]) == (4, 8)
    assert found["measures"]["exact"]["after"] == 0.5
    assert found["rows"]["sources"] == ["right.jsonl", "wrong.jsonl"]
    assert found["rows"]["also_trained"] == {
        "rows": 4, "prompts": 6, "first": "right.jsonl row 1",
    }  # fmt: skip


def test_prompts_are_asked_with_their_answers_and_labels_are_not(tmp_path):
    asked = [{"role": "user", "content": "2+2="}]
    rows = [
        {"prompt": asked, "answer": "4"}, {"prompt": "3+3=", "answer": 6}, {"prompt": "5+5="},
    ]  # fmt: skip
    path = write_lines(tmp_path / "prompts.jsonl", rows)
    labels = write_lines(tmp_path / "labels.jsonl", [{"text": "a", "label": "sad"}])
    found = of_source(ft.Data(str(path), "prompts", first=2))
    assert [(each.prompt, each.expected) for each in found] == [("2+2=", "4"), ("3+3=", "6")]
    other = other_run(tmp_path / "run", "grpo", path, "prompts", reward_funcs=["exact_match"])
    assert overlap(other, found) == Overlap(rows=2, prompts=2, first="prompts.jsonl row 1")
    with pytest.raises(FinetuneError, match="row 3: column 'answer' is null, expected a text to"):
        of_source(ft.Data(str(path), "prompts"))
    with pytest.raises(FinetuneError, match=r"labels\.jsonl row 1: a label is not an answer to"):
        of_source(ft.Data(str(labels), "labelled"))


def test_every_instance_and_pair_of_a_row_is_asked_or_counted_as_trained(tmp_path):
    instances = [{"input": "2 2", "output": "4"}, {"input": "3 3", "output": "6"}]
    tasks = [{"instruction": "Add", "instances": instances}]
    ranked = [{"prompt": "2+2=", "responses": ["5", "4", "3"], "ranks": [1, 0, 2]}]
    for rows, method, format, first, wanted, prompts in (
        (tasks, "sft", "self_instruct", 1, ["4", "6"], 2),
        (ranked, "dpo", "ranked_all", None, ["4"], 1),
    ):
        path = write_lines(tmp_path / f"{format}.jsonl", rows)
        found = of_source(ft.Data(str(path), format, first=first))
        assert [each.expected for each in found] == wanted
        other = other_run(tmp_path / method, method, path, format)
        assert overlap(other, found) == Overlap(prompts, prompts, f"{format}.jsonl row 1")


def test_other_data_than_the_run_had_and_a_run_without_held_out_rows_are_refused(run, tmp_path):
    fields = json.loads(run.recipe.read_text())
    other = write_rows(tmp_path / "one.jsonl", ["something else", *QUESTIONS[:4]])
    fields["data"][0]["source"] = str(other)
    changed = copy_of(run, tmp_path / "run")
    write_json(changed.recipe, fields)
    with pytest.raises(FinetuneError, match="the data is not that of the run"):
        of_run(changed)
    empty = start_run(tmp_path / "empty", None)
    with pytest.raises(FinetuneError, match="no eval_data and no eval_rows; give --data and"):
        of_run(empty)


def test_only_what_passes_the_gate_is_exported(run, capsys, tmp_path):
    words = ["export", str(run.root), "--to", str(tmp_path / "out"), "--check-rows", "0"]
    assert cli.main([*words, "--require", "exact>=0.8"]) == 1
    told = capsys.readouterr()
    assert "FAILED     exact>=0.8: 1, 95 % interval 0.4385 to 1, 3 rows" in told.out
    assert f"step {run.newest()} falls short, and nothing was exported" in told.err
    assert not (tmp_path / "out").exists()
    assert cli.main([*words, "--require", "exact>=0.4"]) == 0
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    assert json.loads((run.root / "eval/export/results.json").read_text())["gate"][0]["passed"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--against", "nowhere/at/all"], "nowhere/at/all: no such run or folder"),
        (["--against", "."], "neither a run (recipe.json), nor a model (config.json), nor an"),
        (["--metrics", "exakt"], "--metrics: got 'exakt', expected one of exact, "),
        (["--metrics", "json"], "one.jsonl row 1: its answer is not JSON"),
        (["--metrics", "tools"], "one.jsonl row 1: it has no tools"),
        (["--metrics", "code"], "one.jsonl row 1: it has no tests (column tests, "),
        (["--metrics", "sql"], "it names no SQLite file (column database); give --database FILE"),
        (["--require", "exact>0.8"], "--require: got 'exact>0.8', expected a measure with a bound"),
        (["--require", "rouge1>=1"], "'rouge1' is not measured; measured are loss, "),
        (["--require", "forgetting<=1", "--against", "none"], "'forgetting' is not measured"),
        (["--against", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1/models: no answer ("),
        (["--judge", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: no answer ("),
        (["--schema", "nowhere.json"], "--schema nowhere.json: no such file"),
        (["--step", "7"], "no complete checkpoint of step 7; 30"),
        (
            ["--output", "."],
            ".: exists and was not written by an evaluation; name another --output",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_named_and_leaves_nothing(run, capsys, tmp_path, words, told):
    (tmp_path / "file").touch()
    kept = sorted(run.root.rglob("*"))
    assert told in evaluate(capsys, run.root, *words, "--max-new-tokens", "2", status=2)
    assert sorted(run.root.rglob("*")) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_rewards_score_the_answers_of_both_models(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "def letters(prompts, completions, answer):\n"
        "    assert all(each[-1]['role'] == 'user' for each in prompts)\n"
        "    said = [each[0]['content'] for each in completions]\n"
        "    return [float(len(one)) if one == two else None for one, two in zip(said, answer)]\n"
    )
    own_modules(tmp_path, monkeypatch)
    words = ["--rewards", "exact_match,own:letters", "--max-new-tokens", "8"]
    found = measured(capsys, run.root, *words, "--require", "reward/letters>=3")
    found = found["measures"]
    assert (found["reward/exact_match"]["before"], found["reward/exact_match"]["after"]) == (0, 1)
    assert found["reward/letters"]["after"] == 3


@pytest.mark.slow  # its process imports torch and loads the model
def test_a_reward_model_scores_answers_as_plain_transformers_does(run, capsys, tmp_path):
    judge = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))
    judge.eval().save_pretrained(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    tokenizer.save_pretrained(tmp_path / "judge")
    words = ["--rewards", tmp_path / "judge", "--max-new-tokens", "8", "--output", "out"]
    found = measured(capsys, run.root, *words)["measures"]["reward/judge"]
    for side in ("before", "after"):
        scores = [
            judge(torch.tensor([tokenizer.apply_chat_template([
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row[side]},
            ])["input_ids"]])).logits.item()
            for row in samples(tmp_path / "out")
        ]  # fmt: skip
        assert found[side] == pytest.approx(sum(scores) / 3, abs=1e-5)


def own_modules(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts import modules of a folder."""
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    patch.delitem(sys.modules, "own", raising=False)


def test_rewards_that_cannot_score_are_named(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "def needs(completions, hint): ...\ndef fails(completions): raise ValueError('no')\n"
    )
    own_modules(tmp_path, monkeypatch)
    nowhere = "'./nowhere': the folder does not exist; name the run of a reward"
    for reward, told in (
        ("exakt", "--rewards: got 'exakt', expected one of exact_match, "),
        ("./nowhere", f"--rewards: {nowhere}"),
        ("own:needs", "--rewards: 'own:needs' needs 'hint', which is neither a column"),
        ("own:fails", "--rewards: reward 'own:fails' raises ValueError: no (own.py:2) (prompt "),
    ):
        words = ["--rewards", reward, "--max-new-tokens", "2", "--limit", "1", "--against", "none"]
        assert told in evaluate(capsys, run.root, *words, "--output", "out", status=2)
        assert not (tmp_path / "out").exists()
