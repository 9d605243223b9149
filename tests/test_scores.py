"""Reward models and classifiers: scores at the last token, on any cut of a step and any backend."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finetune, Tiny, write_recipe
from peft import AutoPeftModelForSequenceClassification as AutoPeftModelForScores
from safetensors.torch import load_file, save_file
from test_backends import launch
from test_dpo import pairs, steps_of, train
from tiny_run import CHATML
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.data.order import rows_of_step
from finetune.errors import FinetuneError
from finetune.inference.scores import reward_model
from finetune.rewards import Reward, functions
from finetune.runs.run import Run

SIZE, STEPS, SEED = 8, 3, 0
EXACT = 1e-5
"""Relative, in fp32: the same sums in another order."""
CLASSES = ("calm", "glad", "sad")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own-cache"))


def labelled(count: int = 24) -> list[dict[str, Any]]:
    """Texts of uneven lengths, of the second class one in six."""
    rng = random.Random(3)
    words = "the a cat dog sees red blue house tree runs sings over under quickly and then".split()
    return [
        {
            "text": " ".join(rng.choices(words, k=rng.randint(1, 30))),
            "label": CLASSES[(0, 2, 1, 0, 2, 0)[number % 6]],
        }
        for number in range(count)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fields(tiny: Tiny, method: str, source: Path, **sections: Any) -> dict[str, Any]:
    data_format = {"reward": "preference", "classifier": "labelled"}[method]
    base: dict[str, Any] = {
        "method": method,
        "model": {"name": str(tiny.model)},
        "data": [{"source": str(source), "format": data_format}],
        "batch": {"rows": SIZE, "micro_rows": SIZE, "max_length": 128},
        "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "max_steps": STEPS,
        "seed": SEED,
    }
    if method == "classifier" and sections.get("problem_type") != "regression":
        base["labels"] = list(CLASSES)
    for name, value in sections.items():
        merge = isinstance(base.get(name), dict) and isinstance(value, dict)
        base[name] = base[name] | value if merge else value
    return base


def assert_equal(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=EXACT, abs=EXACT)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scored")
    margins = [row | {"margin": number % 3 / 2} for number, row in enumerate(pairs(24))]
    return {
        "reward": written(folder / "pairs.jsonl", margins),
        "classifier": written(folder / "labelled.jsonl", labelled()),
    }


# A reward model as a reward.


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["full", "lora"])
def test_a_reward_model_scores_completions_as_plain_transformers_does(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, adapter: Any
) -> None:
    """In groups of several lengths, and with a weight beside a reward that scores some only."""
    run = train(tmp_path / "runs/judge", fields(tiny, "reward", sources["reward"], adapter=adapter))
    kind = AutoModelForSequenceClassification if adapter is None else AutoPeftModelForScores
    plain = kind.from_pretrained(run.final, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(run.final)

    def alone(asked: list[dict[str, str]], answer: str) -> float:
        messages = [*asked, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        with torch.no_grad():
            return plain.eval()(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()

    rows = [
        {"prompt": row["prompt"]} | ({"answer": "yes"} if number % 2 else {})
        for number, row in enumerate(pairs(8))
    ]
    given = {
        "method": "grpo",
        "model": {"name": str(tiny.model)},
        "data": [{"source": str(written(tmp_path / "p.jsonl", rows)), "format": "prompts"}],
        "batch": {"rows": 8, "max_length": 128},
        "reward_funcs": [{"function": str(run.root), "weight": 0.5}, "exact_match"],
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 1,
    }
    online = train(tmp_path / "online", given)
    kept = [json.loads(line) for line in online.completions.read_text().splitlines()]
    assert len(kept) == 8
    asked = {row["prompt"][-1]["content"]: row for row in rows}
    for each in kept:
        row = asked[each["prompt"]]
        score = each["rewards"]["judge"]
        assert score == pytest.approx(alone(row["prompt"], each["completion"]), abs=1e-5)
        assert each["rewards"]["exact_match"] == (0.0 if "answer" in row else None)
        assert each["reward"] == pytest.approx(0.5 * score)
    (step,) = online.read_metrics("train")
    mean = sum(each["rewards"]["judge"] for each in kept) / 8
    assert step["metrics"]["rewards/judge/mean"] == pytest.approx(mean)
    assert len({each["rewards"]["judge"] for each in kept}) > 4


def test_a_reward_model_reads_the_tools_and_template_variables_of_a_prompt(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path
) -> None:
    """As in its own training, where they are columns of the pairs."""
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{{ tone }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    )
    model = {"name": str(tiny.model), "chat_template": str(template)}
    judge = train(tmp_path / "judge", fields(tiny, "reward", sources["reward"], model=model))
    plain = AutoModelForSequenceClassification.from_pretrained(judge.final, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge.final)
    tool = {"type": "function", "function": {"name": "see", "parameters": {}}}
    context: list[dict[str, Any]] = [
        {"tools": [tool]},
        {"chat_template_kwargs": {"tone": "red"}},
        {},
    ]
    rows = [
        {"messages": [{"role": "user", "content": f"the cat {n}"}], **context[n % 3]}
        for n in range(6)
    ]
    given = {
        "method": "grpo",
        "model": model,
        "data": [{"source": str(written(tmp_path / "p.jsonl", rows)), "format": "prompts"}],
        "batch": {"rows": 12, "max_length": 128},
        "reward_funcs": [str(judge.root)],
        "num_generations": 2,
        "max_completion_length": 8,
        "max_steps": 3,
    }
    run = train(tmp_path / "online", given)
    asked = {row["messages"][0]["content"]: row for row in rows}
    shown = [json.loads(line) for line in run.completions.read_text().splitlines()]
    seen = set[int]()
    for each in shown:
        row = asked[each["prompt"]]
        seen.add(context.index({k: v for k, v in row.items() if k != "messages"}))
        said = [*row["messages"], {"role": "assistant", "content": each["completion"]}]
        words = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        text = tokenizer.apply_chat_template(said, tokenize=False, **words)
        with torch.no_grad():
            wanted = plain(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert each["reward"] == pytest.approx(wanted, abs=1e-5)
    assert seen == {0, 1, 2}


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


# Published values.

EVERY_DAY = ("bradley_terry/lora", "classification_multi/full")
OTHERS = (
    "bradley_terry/full", "bradley_terry_centred0.01/full", "classification_single/full",
    "classification_single/lora", "classification_regression/full",
)  # fmt: skip
KINDS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


def start(assets: Path, folder: Path, labels: int, lora: bool) -> None:
    """The published start: a base with its score head, and the adapter with another copy of it."""
    name = assets / "models/stories260K"
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=labels)
    row, column = (torch.arange(n, dtype=torch.float64) for n in (labels, 64))
    with torch.no_grad():
        model.score.weight.copy_(0.05 * torch.sin(0.9 * row[:, None] + 0.4 * column + 1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(name).save_pretrained(folder)
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
    oracles = assets / "oracles"
    if not oracles.is_dir():
        pytest.skip("no published values among the assets")
    run = json.loads((oracles / "reward_and_classification.json").read_text())["runs"][name]
    texts = {e["row"]: e for e in json.loads((oracles / "pairs.json").read_text())["rows"]}
    settings, lora = run["config"], run["policy"] != "full"
    labels = settings.get("labels", 1)
    start(assets, folder / "base", labels, lora)
    wanted = [
        (row, label)
        for step in run["steps"]
        for row, label in zip(step["rows"], step.get("labels") or [None] * SIZE, strict=True)
    ]
    order = rows_of_step(0, len(wanted), len(wanted), SEED).tolist()
    placed = [each for _, each in sorted(zip(order, wanted, strict=True), key=lambda pair: pair[0])]
    given: dict[str, Any] = {
        "model": {"name": str(folder / "base"), "chat_template": str(oracles / "template.jinja")},
        "batch": {"rows": SIZE, "micro_rows": 4, "max_length": 512},
        "optim": {"lr": run["lr"], "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "max_steps": len(run["steps"]),
    }
    if lora:
        given["model"]["adapter"] = str(folder / "base/adapter")
        given["adapter"] = {"r": 4, "alpha": 8}
    if name.startswith("bradley_terry"):
        columns = ("prompt", "chosen", "rejected")
        rows = [{column: texts[row][column] for column in columns} for row, _ in placed]
        given |= {"method": "reward", "center_rewards_coefficient": settings["centre_coefficient"]}
        data_format = "preference"
    else:
        rows = [
            {"messages": texts[row]["prompt"] + texts[row]["chosen"], "label": of_file(label)}
            for row, label in placed
        ]
        given |= {"method": "classifier", "problem_type": KINDS[settings["kind"]]}
        if settings["kind"] != "regression":
            given["labels"] = [f"class {number}" for number in range(labels)]
        data_format = "labelled"
    source = written(folder / "rows.jsonl", rows)
    given["data"] = [{"source": str(source), "format": data_format}]
    return given, run


def of_file(label: Any) -> Any:
    """Independent labels as a list of the numbers of those that hold."""
    if not isinstance(label, list):
        return label
    return [number for number, holds in enumerate(label) if holds]


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_training_reproduces_published_values(assets: Path, tmp_path: Path, name: str) -> None:
    """TRL and a computation on single sequences: they agree to 7e-7."""
    given, run = published(assets, tmp_path, name)
    found = steps_of(train(tmp_path / "run", given))
    for mine, theirs in zip(found, run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for metric in ("margin", "mean_reward", "accuracy", "min_reward", "max_reward"):
            if metric in theirs:
                assert mine[metric] == pytest.approx(theirs[metric], abs=1e-5)


def test_a_score_is_read_at_the_end_token_though_pad_is_the_same(
    assets: Path, tmp_path: Path
) -> None:
    """The published scores, and those that transformers gives one token early."""
    oracles = assets / "oracles"
    if not oracles.is_dir():
        pytest.skip("no published values among the assets")
    found = json.loads((oracles / "reward_and_classification.json").read_text())
    wanted = found["runs"]["trap_pad_is_eos"]
    start(assets, tmp_path / "base", 1, lora=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (oracles / "template.jinja").read_text()
    tokenizer.save_pretrained(tmp_path / "base")
    rows = json.loads((oracles / "pairs.json").read_text())["rows"]
    rows = rows[: len(wanted["scores_at_the_end_token"])]
    prompts, answers = ([row[name] for row in rows] for name in ("prompt", "chosen"))
    scored = reward_model(prompts, answers, model=str(tmp_path / "base"))
    assert scored == pytest.approx(wanted["scores_at_the_end_token"], abs=1e-5)
    assert scored != pytest.approx(wanted["scores_by_transformers"], abs=1e-2)


# However a step is cut.

CUTS: dict[str, dict[str, Any]] = {
    "one at a time": {"micro_rows": 1, "padding_free": False},
    "two, side by side": {"micro_rows": 2, "padding_free": True},
    "by tokens, padded": {"micro_tokens": 300, "padding_free": False},
}


@pytest.mark.parametrize("method", ["reward", "classifier"])
def test_a_step_does_not_depend_on_its_micro_batches(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, method: str
) -> None:
    source = sources[method]
    whole = train(tmp_path / "whole", fields(tiny, method, source))
    for name, batch in CUTS.items():
        run = train(tmp_path / name, fields(tiny, method, source, batch=batch))
        assert_equal(steps_of(run), steps_of(whole))


@pytest.mark.parametrize("method", ["reward", "classifier"])
def test_packs_train_as_rows_do(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, method: str
) -> None:
    """All packs in one step, so that its rows are those of the data."""
    batch = {"packing": True, "micro_rows": 1, "max_length": 128}
    probe = ft.train(
        catalog.from_fields(
            fields(tiny, method, sources[method], batch={**batch, "rows": 1}, max_steps=1)
        ),
        precision="fp32",
        output=tmp_path / "probe",
    )
    packs = json.loads(probe.data.read_text())["train"]["rows"]
    assert packs < 24
    batch["rows"] = packs
    packed = train(tmp_path / "packed", fields(tiny, method, sources[method], batch=batch))
    alone = train(tmp_path / "alone", fields(tiny, method, sources[method], batch={"rows": 24}))
    assert_equal(steps_of(packed), steps_of(alone))


@pytest.mark.parametrize(
    ("backend", "method", "sections"),
    [
        pytest.param(backend, method, sections, id=f"{backend}-{method}", marks=pytest.mark.slow)
        for backend in ("ddp", "fsdp_full_shard", "zero2", "zero3")
        for method, sections in (
            ("reward", {"batch": {"micro_rows": 1}}),
            ("classifier", {"adapter": {"r": 4}, "batch": {"micro_rows": 2}}),
        )
    ],
)
def test_backends_train_as_one_process_does(
    tiny: Tiny, sources: dict[str, Path], finetune: Finetune, tmp_path: Path, backend: str,
    method: str, sections: Any,
) -> None:  # fmt: skip
    given = fields(tiny, method, sources[method], eval_rows=6, **sections)
    alone = train(tmp_path / "alone", given)
    launch(finetune, write_recipe(tmp_path / "r.json", given), backend, tmp_path / backend)
    other = Run(tmp_path / backend)
    assert_equal(steps_of(other), steps_of(alone))
    (mine,), (theirs,) = (list(run.read_metrics("eval")) for run in (other, alone))
    assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=EXACT)
    first, second = (load_file(next(r.final.glob("*model.safetensors"))) for r in (other, alone))
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=1e-4, atol=1e-5), name


# What comes out.


def scores(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Padded together, as transformers scores them."""
    with torch.no_grad():
        return model.eval()(**tokenizer(texts, return_tensors="pt", padding=True)).logits


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("reward", None),
        ("classifier", "multi_label_classification"),
        ("classifier", "regression"),
    ],
)
def test_exports_of_every_kind_of_score_head_load_in_plain_libraries(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, method: str, kind: str | None
) -> None:
    """The adapter in PEFT and the merged model in transformers give the scores of final/."""
    sections = {} if kind is None else {"problem_type": kind}
    source = sources[method]
    if kind in LABELS:
        rows = [row | {"label": LABELS[kind](row["label"])} for row in labelled(24)]
        source = written(tmp_path / "rows.jsonl", rows)
    run = train(tmp_path / "run", fields(tiny, method, source, adapter={"r": 4}, **sections))
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


LABELS = {
    "multi_label_classification": lambda name: [name],
    "regression": lambda name: float(CLASSES.index(name)),
}
"""Labels of other kinds of classification, from those of `labelled`."""


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["full", "lora"])
def test_a_result_loads_in_plain_libraries_with_the_metrics_of_training(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    adapter: Any,
) -> None:  # fmt: skip
    """Accuracy and macro F1 of the last evaluation, computed again by their definitions."""
    held_out = labelled(30)[24:]
    given = fields(
        tiny, "classifier", sources["classifier"], adapter=adapter, max_steps=6,
        eval_data=[
            {"source": str(written(tmp_path / "held.jsonl", held_out)), "format": "labelled"}
        ],
        evaluation={"micro_rows": 2},
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
    with pytest.raises(FinetuneError, match="it scores texts and does not generate"):
        ft.load(run)
    with pytest.raises(FinetuneError, match="it scores texts and does not generate"):
        ft.open_model(final)
    if adapter is not None:
        merged = ft.export(run, tmp_path / "merged", merge=True)
        whole = AutoModelForSequenceClassification.from_pretrained(merged)
        assert whole.config.id2label == config.id2label
        assert whole.config.pad_token_id == config.pad_token_id
        assert torch.allclose(scores(whole, tokenizer, texts), found, atol=1e-5)


def test_a_pad_token_that_ends_sequences_is_replaced(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path
) -> None:
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
    rows = pairs(24)
    chats = [row["prompt"] + row["chosen"] for row in rows]
    together = tokenizer.apply_chat_template(
        chats, return_tensors="pt", return_dict=True, padding=True
    )
    alone = [
        tokenizer.apply_chat_template([chat], return_tensors="pt", return_dict=True)
        for chat in chats
    ]
    assert int(alone[0]["input_ids"][0, -1]) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        padded = model.eval()(**together).logits[:, 0]
        single = torch.stack([
            model.score(model.model(**each).last_hidden_state[0, -1])[0] for each in alone
        ])  # fmt: skip
    assert torch.allclose(padded, single, atol=1e-5)


def test_resuming_goes_on_as_a_straight_run_does(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path
) -> None:
    given = fields(tiny, "classifier", sources["classifier"], adapter={"r": 4}, saving={"every": 2})
    straight = train(tmp_path / "straight", given)
    shutil.copytree(straight.root, tmp_path / "resumed")
    resumed = Run(tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(3))
    train(resumed.root, given, resume=True)
    assert steps_of(resumed) == steps_of(straight)


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_a_finished_run_goes_on_with_its_head_for_the_same_labels_only(
    tiny: Tiny, sources: dict[str, Path], tmp_path: Path, adapter: Any
) -> None:
    def given(**sections: Any) -> dict[str, Any]:
        return fields(tiny, "classifier", sources["classifier"], adapter=adapter, **sections)

    run = train(tmp_path / "run", given())
    unmoved = {"optim": {"lr": 1e-12}, "max_steps": 1}
    on = train(tmp_path / "on", given(model={"name": str(run.root)}, **unmoved))
    kind = AutoModelForSequenceClassification if adapter is None else AutoPeftModelForScores
    before, after = (kind.from_pretrained(each.final, num_labels=3) for each in (run, on))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(before.eval()(ids).logits, after.eval()(ids).logits, atol=1e-6)
    told = {
        ("glad", "sad", "calm"): "for the labels in the order calm, glad, sad, and the recipe has",
        ("calm", "glad", "sad", "mad"): r"for 3 labels \(calm, glad, sad\), and the recipe has 4",
    }
    for labels, message in told.items():
        with pytest.raises(FinetuneError, match=message):
            train(tmp_path / "other", given(model={"name": str(run.root)}, labels=labels))


# What is refused.

BAD_LABELS: dict[str, tuple[str, Any, str]] = {
    "another class": ("single_label_classification", "angry", "label is 'angry', expected one of"),
    "a number beyond": ("single_label_classification", 3, "label is 3, expected one of"),
    "a vector": (
        "multi_label_classification", [1, 0, 1], r"label is \[1, 0, 1\], in which a number is",
    ),
    "digits": ("single_label_classification", "1" * 5000, "label is '1{20,}"),
    "no list": ("multi_label_classification", "calm", "label is text, expected a list"),
    "another class in a list": (
        "multi_label_classification", ["calm", 7], r"label\[1\] is 7, expected one of",
    ),
    "no number": ("regression", "high", "label is 'high', expected a number"),
    "not finite": ("regression", "nan", "label is nan, expected a finite number"),
    "beyond fp32": ("regression", 1e300, r"label is 1e\+300, expected a finite number \(fp32\)"),
    "missing": ("regression", None, r"the row has 'text', 'label' \(null\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_cannot_be_learned_are_named_by_file_and_row(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    kind, label, message = BAD_LABELS[name]
    good: Any = {"regression": 0.5, "multi_label_classification": ["sad"]}.get(kind, "sad")
    source = written(
        tmp_path / "rows.jsonl", [{"text": "a", "label": good}, {"text": "b", "label": label}]
    )
    given = fields(tiny, "classifier", source, problem_type=kind)
    with pytest.raises(FinetuneError, match=rf"rows.jsonl row 2: .*{message}"):
        train(tmp_path / "run", given)


def test_the_command_refuses_bad_input_with_status_2(
    tiny: Tiny, sources: dict[str, Path], finetune: Finetune, tmp_path: Path
) -> None:
    same = written(tmp_path / "same.jsonl", [row | {"label": "sad"} for row in labelled(6)])
    recipe = write_recipe(tmp_path / "same.json", fields(tiny, "classifier", same))
    found = finetune("train", recipe, "--output", tmp_path / "run")
    assert (found.status, "Traceback" in found.output) == (2, False)
    assert "all 6 rows have the same label: calm 0, glad 0, sad 6" in found.output
    given = fields(tiny, "classifier", sources["reward"])
    given["data"][0]["format"] = "preference"
    found = finetune("inspect", write_recipe(tmp_path / "other.json", given))
    assert found.status == 2
    assert "learns from sequences with a label (formats: labelled)" in found.output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": []}, "`labels` has 0 names"),
        ({"labels": ["a", "a"]}, "`labels` has a name twice"),
        ({"class_weights": {"calmer": 2.0}}, "`class_weights` names calmer"),
        ({"problem_type": "regression", "labels": ["a"]}, "belong to classes"),
    ],
)
def test_fields_that_do_not_apply_are_refused(
    tiny: Tiny, sources: dict[str, Path], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(FinetuneError, match=message):
        catalog.from_fields(fields(tiny, "classifier", sources["classifier"]) | changed)


def test_inspect_shows_what_is_scored(
    tiny: Tiny, sources: dict[str, Path], finetune: Finetune, tmp_path: Path
) -> None:
    given = fields(tiny, "classifier", sources["classifier"])
    found = finetune("inspect", write_recipe(tmp_path / "r.json", given))
    assert found.status == 0
    assert "tokens, scored at the last, label: " in found.stdout
    assert "labels: calm 12, glad 4, sad 8" in found.stdout
