"""Reward models and classifiers: scores at the last token, on any cut of a step and any backend."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, copy_of, once, slow_but, write_recipe
from oracles import MODEL, placed, recipe_of, run_of_file, stored, texts
from peft import AutoPeftModelForSequenceClassification as AutoPeftModelForScores
from preference import (
    CUTS,
    EXACT,
    SIZE,
    WORDS,
    assert_equal,
    completions,
    fields_of,
    packed_and_alone,
    pairs,
    sampled_fields,
    steps_of,
    train,
    written,
)
from safetensors.torch import load_file, save_file
from tiny_run import CHATML
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.data.read.labels import class_of
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.inference.score import reward_model
from finetune.rewards import Reward, functions
from finetune.runs.run import Run

CLASSES = ("calm", "glad", "sad")
SINGLE, MULTI = "single_label_classification", "multi_label_classification"
LORA = {"r": 4}
FULL_OR_LORA = pytest.mark.parametrize(
    "adapter",
    [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param(LORA, id="lora")],
)


def labelled(count: int = 24) -> list[dict[str, Any]]:
    """Texts of uneven lengths, of the second class one in six."""
    rng = random.Random(3)
    return [
        {
            "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 30))),
            "label": CLASSES[(0, 2, 1, 0, 2, 0)[number % 6]],
        }
        for number in range(count)
    ]


def fields(tiny: Tiny, method: str, source: Path, **sections: Any) -> dict[str, Any]:
    kind = {"reward": "preference", "classifier": "labelled"}[method]
    if method == "classifier" and sections.get("problem_type") != "regression":
        sections = {"labels": list(CLASSES)} | sections
    return fields_of(method, tiny.model, source, kind, **sections)


@pytest.fixture(scope="session")
def sources(shared) -> dict[str, Path]:
    margins = [row | {"margin": number % 3 / 2} for number, row in enumerate(pairs())]
    return {
        method: once(
            shared / f"methods/{method}.jsonl", lambda path, rows=rows: written(path, rows)
        )
        for method, rows in (("reward", margins), ("classifier", labelled()))
    }


@pytest.fixture(scope="module")
def classified(tiny, sources, tmp_path_factory) -> Run:
    """Two steps of a classifier with an adapter."""
    given = fields(tiny, "classifier", sources["classifier"], adapter=LORA, saving={"every": 1})
    return train(tmp_path_factory.mktemp("classified") / "run", given)


@FULL_OR_LORA
def test_a_reward_model_scores_completions_as_plain_transformers_does(
    tiny, sources, tmp_path, adapter
):
    """With tools and template variables, and a weight beside a reward that scores some only."""
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{{ tone }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    )
    model = {"name": str(tiny.model), "chat_template": str(template)}
    judged = fields(tiny, "reward", sources["reward"], adapter=adapter, model=model)
    run = train(tmp_path / "runs/judge", judged)
    kind = AutoModelForSequenceClassification if adapter is None else AutoPeftModelForScores
    plain = kind.from_pretrained(run.final, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    tool = {"type": "function", "function": {"name": "see", "parameters": {}}}
    context = [{"tools": [tool]}, {"chat_template_kwargs": {"tone": "red"}}, {"answer": "yes"}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"the cat {n}"}], **context[n]} for n in range(3)
    ]
    given = sampled_fields(
        tiny.model, written(tmp_path / "p.jsonl", rows), model=model, max_steps=2,
        batch={"micro_rows": 1, "max_length": 128},
        reward_funcs=[{"function": str(run.root), "weight": 0.5}, "exact_match"],
    )  # fmt: skip
    sampled = train(tmp_path / "online", given)
    kept, scores = completions(sampled), list[float]()
    assert {each["prompt"] for each in kept} == {f"the cat {n}" for n in range(3)}
    for each in kept:
        (row,) = (row for row in rows if row["messages"][0]["content"] == each["prompt"])
        said = [*row["messages"], {"role": "assistant", "content": each["completion"]}]
        words = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        text = tokenizer.apply_chat_template(said, tokenize=False, **words)
        with torch.no_grad():
            score = plain(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        scores.append(each["rewards"]["judge"])
        assert scores[-1] == pytest.approx(score, abs=1e-5)
        assert each["rewards"]["exact_match"] == (0.0 if "answer" in row else None)
        assert each["reward"] == pytest.approx(0.5 * scores[-1])
    for number, step in enumerate(sampled.read_metrics("train")):
        mean = sum(scores[8 * number :][:8]) / 8
        assert step["metrics"]["rewards/judge/mean"] == pytest.approx(mean)
    assert len(set(scores)) > 8


def test_a_folder_without_a_score_head_is_not_a_reward(tiny: Tiny, tmp_path: Path) -> None:
    sft = Run(tmp_path / "sft")
    sft.root.mkdir()
    sft.recipe.write_text('{"method": "sft"}')
    named = ("runs/none", str(tiny.model), str(sft.root))
    assert functions.problems(Reward(name) for name in named) == [
        "reward_funcs: 'runs/none': the folder does not exist; name the run of a reward model",
        f"reward_funcs: '{tiny.model}': neither a run nor a folder with a complete reward model "
        "(architectures in config.json: ['LlamaForCausalLM']); name a run of method reward, or its "
        "export with --merge",
        f"reward_funcs: '{sft.root}': a run of method sft, expected one of method reward",
    ]


EVERY_DAY = ("bradley_terry/lora", "classification_multi/full")
PUBLISHED = (
    *EVERY_DAY, "bradley_terry/full", "bradley_terry_centred0.01/full",
    "classification_single/full", "classification_single/lora", "classification_regression/full",
)  # fmt: skip
KINDS = {"single": SINGLE, "multi": MULTI, "regression": "regression"}


def start(assets: Path, folder: Path, labels: int, lora: bool) -> None:
    """The published start: a base with its score head, and the adapter with another copy of it."""
    model = AutoModelForSequenceClassification.from_pretrained(assets / MODEL, num_labels=labels)
    row, column = (torch.arange(n, dtype=torch.float64) for n in (labels, 64))
    with torch.no_grad():
        model.score.weight.copy_(0.05 * torch.sin(0.9 * row[:, None] + 0.4 * column + 1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets / MODEL).save_pretrained(folder)
    if not lora:
        return
    given, place = assets / "oracles/adapter", folder / "adapter"
    place.mkdir()
    config = json.loads((given / "adapter_config.json").read_text())
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(given / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = model.score.weight.detach().clone()
    save_file(tensors, place / "adapter_model.safetensors")


def published(assets: Path, folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe that trains on the rows of the published steps in their order, and the run."""
    run = run_of_file(assets, "reward_and_classification", name)
    settings, lora = run["config"], run["policy"] != "full"
    count, of_row = settings.get("labels", 1), texts(assets)
    start(assets, folder / "base", count, lora)
    rows = placed([
        (of_row[row], label)
        for step in run["steps"]
        for row, label in zip(step["rows"], step.get("labels") or [None] * SIZE, strict=True)
    ])  # fmt: skip
    if name.startswith("bradley_terry"):
        columns = ("prompt", "chosen", "rejected")
        kept = [{column: row[column] for column in columns} for row, _ in rows]
        own = {"center_rewards_coefficient": settings["centre_coefficient"]}
        how = "reward", written(folder / "rows.jsonl", kept), "preference"
    else:
        kept = [
            {"messages": row["prompt"] + row["chosen"], "label": of_file(label)}
            for row, label in rows
        ]
        own = {"problem_type": KINDS[settings["kind"]]}
        if settings["kind"] != "regression":
            own["labels"] = [f"class {number}" for number in range(count)]
        how = "classifier", written(folder / "rows.jsonl", kept), "labelled"
    given = recipe_of(assets, *how, run, **own)
    given["model"]["name"] = str(folder / "base")
    if lora:
        given["model"]["adapter"] = str(folder / "base/adapter")
        given["adapter"] = {"r": 4, "alpha": 8}
    return given, run


def of_file(label: Any) -> Any:
    """Independent labels as a list of the numbers of those that hold."""
    if not isinstance(label, list):
        return label
    return [number for number, holds in enumerate(label) if holds]


@pytest.mark.parametrize("name", slow_but(EVERY_DAY, PUBLISHED))
def test_training_reproduces_published_values(assets, tmp_path, name):
    """TRL and a computation on single sequences: they agree to 7e-7."""
    given, run = published(assets, tmp_path, name)
    for mine, theirs in zip(steps_of(train(tmp_path / "run", given)), run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for metric in ("margin", "mean_reward", "accuracy", "min_reward", "max_reward"):
            if metric in theirs:
                assert mine[metric] == pytest.approx(theirs[metric], abs=1e-5)


def test_a_score_is_read_at_the_end_token_though_pad_is_the_same(assets, tmp_path):
    """The published scores, and those that transformers gives one token early."""
    wanted = stored(assets, "reward_and_classification")["runs"]["trap_pad_is_eos"]
    start(assets, tmp_path / "base", 1, lora=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (assets / "oracles/template.jinja").read_text()
    tokenizer.save_pretrained(tmp_path / "base")
    rows = stored(assets, "pairs")["rows"][: len(wanted["scores_at_the_end_token"])]
    prompts, answers = ([row[name] for row in rows] for name in ("prompt", "chosen"))
    scored = reward_model(prompts, answers, model=str(tmp_path / "base"))
    assert scored == pytest.approx(wanted["scores_at_the_end_token"], abs=1e-5)
    assert scored != pytest.approx(wanted["scores_by_transformers"], abs=1e-2)


BOTH = pytest.mark.parametrize("method", ["reward", "classifier"])


@BOTH
def test_a_step_does_not_depend_on_its_micro_batches(tiny, sources, tmp_path, method):
    whole = train(tmp_path / "whole", fields(tiny, method, sources[method]))
    for name, batch in CUTS.items():
        run = train(tmp_path / name, fields(tiny, method, sources[method], batch=batch))
        assert_equal(steps_of(run), steps_of(whole), near=EXACT)


@BOTH
def test_packs_train_as_rows_do(tiny, sources, tmp_path, method):
    packed, alone = packed_and_alone(fields(tiny, method, sources[method]), tmp_path)
    assert_equal(steps_of(packed), steps_of(alone), near=EXACT)


def scores(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Padded together, as transformers scores them."""
    with torch.no_grad():
        return model.eval()(**tokenizer(texts, return_tensors="pt", padding=True)).logits


LABELS = {MULTI: lambda name: [name], "regression": lambda name: float(CLASSES.index(name))}
"""Labels of other kinds of classification, from those of `labelled`."""


@pytest.mark.parametrize("kind", slow_but((None,), (None, *LABELS)))
def test_exports_of_every_kind_of_score_head_load_in_plain_libraries(tiny, sources, tmp_path, kind):
    """The adapter in PEFT and the merged model in transformers give the scores of final/."""
    given = fields(tiny, "reward", sources["reward"], adapter=LORA)
    if kind is not None:
        rows = (row | {"label": LABELS[kind](row["label"])} for row in labelled())
        source = written(tmp_path / "rows.jsonl", rows)
        given = fields(tiny, "classifier", source, adapter=LORA, problem_type=kind)
    run = train(tmp_path / "run", given)
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    texts = ["one two", "three", "four five six"]
    adapter = ft.export(run, tmp_path / "adapter")
    merged = ft.export(run, tmp_path / "merged", merge=True)
    found = AutoModelForSequenceClassification.from_pretrained(merged)
    assert found.config.problem_type == kind
    count = 1 if kind in (None, "regression") else len(CLASSES)
    given = scores(found, tokenizer, texts)
    assert given.shape == (3, count)
    for folder in (run.final, adapter):
        plain = AutoPeftModelForScores.from_pretrained(folder, num_labels=count)
        assert torch.allclose(scores(plain, tokenizer, texts), given, atol=1e-5)


@FULL_OR_LORA
def test_a_result_loads_in_plain_libraries_with_the_metrics_of_training(
    tiny, sources, tmp_path, monkeypatch, adapter
):
    """Accuracy and macro F1 of the last evaluation, computed again by their definitions."""
    held_out = labelled(30)[24:]
    eval_data = {"source": str(written(tmp_path / "held.jsonl", held_out)), "format": "labelled"}
    given = fields(
        tiny, "classifier", sources["classifier"], adapter=adapter, max_steps=6,
        eval_data=[eval_data], evaluation={"micro_rows": 2},
    )  # fmt: skip
    run = train(tmp_path / "run", given)
    final = run.final
    config = AutoConfig.from_pretrained(final)
    assert config.id2label == dict(enumerate(CLASSES))
    assert config.problem_type == "single_label_classification"
    code = (final / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(final)
    loaded: dict[str, Any] = {}
    exec(code, loaded)  # as the card says
    model, tokenizer = loaded["model"], loaded["tokenizer"]
    assert model.config.id2label == config.id2label
    texts = [row["text"] for row in held_out]
    found = scores(model, tokenizer, texts)
    said, true = found.argmax(1).tolist(), [CLASSES.index(row["label"]) for row in held_out]
    (record,) = run.read_metrics("eval")
    loss = torch.nn.functional.cross_entropy(found, torch.tensor(true))
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    hits = sum(a == b for a, b in zip(said, true, strict=True))
    assert record["metrics"]["accuracy"] == pytest.approx(hits / len(true))
    shares = []
    for number in sorted({*said, *true}):
        right = sum(a == b == number for a, b in zip(said, true, strict=True))
        shares.append(2 * right / (said.count(number) + true.count(number)))
    assert record["metrics"]["f1"] == pytest.approx(sum(shares) / len(shares))
    assert "pipeline_tag: text-classification" in (final / "README.md").read_text()
    for opened in (lambda: ft.load(run), lambda: ft.open_model(final)):
        with pytest.raises(FinetuneError, match="it scores texts and does not generate"):
            opened()
    if adapter is not None:
        merged = ft.export(run, tmp_path / "merged", merge=True)
        whole = AutoModelForSequenceClassification.from_pretrained(merged)
        assert whole.config.id2label == config.id2label
        assert whole.config.pad_token_id == config.pad_token_id
        assert torch.allclose(scores(whole, tokenizer, texts), found, atol=1e-5)


def test_a_pad_token_that_ends_sequences_is_replaced(tiny, sources, tmp_path):
    """transformers reads the score before the pad token: with pad = end one token early."""
    base = tmp_path / "base"
    shutil.copytree(tiny.model, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.add_special_tokens({"unk_token": "<|pad|>"})
    tokenizer.chat_template = (
        "{% for each in messages %}<|im_start|>{{ each['role'] }}\n{{ each['content'] }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(base)
    given = fields(tiny, "reward", sources["reward"], model={"name": str(base)}, eval_rows=4)
    run = train(tmp_path / "run", given)
    model = AutoModelForSequenceClassification.from_pretrained(run.final)
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    chats = [row["prompt"] + row["chosen"] for row in pairs()]
    how = {"return_tensors": "pt", "return_dict": True}
    together = tokenizer.apply_chat_template(chats, padding=True, **how)
    alone = [tokenizer.apply_chat_template([chat], **how) for chat in chats]
    assert int(alone[0]["input_ids"][0, -1]) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        padded = model.eval()(**together).logits[:, 0]
        single = torch.stack([
            model.score(model.model(**each).last_hidden_state[0, -1])[0] for each in alone
        ])  # fmt: skip
    assert torch.allclose(padded, single, atol=1e-5)


def test_resuming_goes_on_as_a_straight_run_does(classified, tmp_path):
    resumed = copy_of(classified, tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(2))
    train(resumed.root, catalog.to_fields(catalog.load(classified.recipe)), resume=True)
    assert steps_of(resumed) == steps_of(classified)


@FULL_OR_LORA
def test_a_finished_run_goes_on_with_its_head_for_the_same_labels_only(
    tiny, sources, tmp_path, adapter, classified
):
    given = fields(tiny, "classifier", sources["classifier"], adapter=adapter)
    run = classified if adapter else train(tmp_path / "run", given)
    given |= {"model": {"name": str(run.root)}, "optim": {"lr": 1e-12}, "max_steps": 1}
    on = train(tmp_path / "on", given)
    kind = AutoModelForSequenceClassification if adapter is None else AutoPeftModelForScores
    before, after = (kind.from_pretrained(each.final, num_labels=3) for each in (run, on))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(before.eval()(ids).logits, after.eval()(ids).logits, atol=1e-6)
    for labels, message in (
        ("glad sad calm", "for the labels in the order calm, glad, sad, and the recipe has"),
        ("calm glad sad mad", r"for 3 labels \(calm, glad, sad\), and the recipe has 4"),
    ):
        with pytest.raises(FinetuneError, match=message):
            train(tmp_path / "other", given | {"labels": labels.split()})


def test_labels_are_read_by_name_only_where_a_name_is_a_number():
    stars, poles = ["1", "2.0", "3"], ["neg", "pos"]
    assert [class_of(value, stars) for value in (1, "1", 2, "2.0", 3.0)] == [0, 0, 1, 1, 2]
    assert [class_of(value, poles) for value in ("pos", 1, "1", 1.0)] == [1] * 4
    with pytest.raises(RowProblem, match=r"label is 0, expected one of .* \('1', '2.0', '3'\)$"):
        class_of(0, stars)


BAD_LABELS: dict[str, tuple[str, Any, str]] = {
    "another class": (SINGLE, "angry", "label is 'angry', expected one of"),
    "a number beyond": (SINGLE, 3, "label is 3, expected one of"),
    "a vector": (MULTI, [1, 0, 1], r"label is \[1, 0, 1\], in which a number is"),
    "digits": (SINGLE, "1" * 5000, "label is '1{20,}"),
    "no list": (MULTI, "calm", "label is text, expected a list"),
    "another class in a list": (MULTI, ["calm", 7], r"label\[1\] is 7, expected one of"),
    "no number": ("regression", "high", "label is 'high', expected a finite number"),
    "not finite": ("regression", "nan", "label is nan, expected a finite number"),
    "beyond fp32": ("regression", 1e300, r"label is 1e\+300, expected a finite number"),
    "missing": ("regression", None, r"the row has 'text', 'label' \(null\)"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_cannot_be_learned_are_named_by_file_and_row(tiny, tmp_path, name):
    kind, label, message = BAD_LABELS[name]
    good = {"regression": 0.5, MULTI: ["sad"], SINGLE: "sad"}[kind]
    rows = [{"text": "a", "label": good}, {"text": "b", "label": label}]
    given = fields(tiny, "classifier", written(tmp_path / "rows.jsonl", rows), problem_type=kind)
    with pytest.raises(FinetuneError, match=rf"rows.jsonl row 2: .*{message}"):
        train(tmp_path / "run", given)


def test_commands_show_what_is_scored_and_refuse_bad_input(tiny, sources, finetune, tmp_path):
    given = fields(tiny, "classifier", sources["classifier"])
    found = finetune("inspect", write_recipe(tmp_path / "r.json", given)).passed()
    assert "tokens, scored at the last, label: " in found.stdout
    assert "labels: calm 12, glad 4, sad 8" in found.stdout
    same = written(tmp_path / "same.jsonl", (row | {"label": "sad"} for row in labelled(6)))
    alike = write_recipe(tmp_path / "same.json", fields(tiny, "classifier", same))
    given["data"] = [{"source": str(sources["reward"]), "format": "preference"}]
    other = write_recipe(tmp_path / "other.json", given)
    for words, told in (
        (("train", alike, "--output", tmp_path / "run"), "all 6 rows have the same label: calm 0, "
         "glad 0, sad 6"),
        (("inspect", other), "learns from sequences with a label (formats: labelled)"),
    ):  # fmt: skip
        found = finetune(*words)
        assert (found.status, "Traceback" in found.output) == (2, False)
        assert told in found.output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": []}, "`labels` has 0 names"),
        ({"labels": ["a", "a"]}, "`labels` has a name twice"),
        ({"class_weights": {"calmer": 2.0}}, "`class_weights` names calmer"),
        ({"problem_type": "regression", "labels": ["a"]}, "belong to classes"),
    ],
)
def test_fields_that_do_not_apply_are_refused(tiny, sources, changed, message):
    with pytest.raises(FinetuneError, match=message):
        catalog.from_fields(fields(tiny, "classifier", sources["classifier"]) | changed)
