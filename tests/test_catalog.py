"""A recipe is the same value in Python, YAML and JSON, and changes only where it is told to."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from conftest import problems_of

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods import find_method
from finetune.methods.pretrain import Pretrain
from finetune.methods.sft import SFT
from finetune.recipe import Batch, Data, Evaluation, Kernels, LoRA, Model, Optim, Recipe, Saving

SHIPPED = catalog.names()

PYTHON = """
from finetune import Data, Model, SFT

recipe = (
    SFT(Model("models/small", revision="81e4321"), eval_rows=5, train_on="completion")
    .with_data(Data("a.jsonl", "messages", first=100), Data("b.csv", "alpaca", repeat=2))
    .with_qlora(r=8, alpha=12, targets=("q_proj", "v_proj"), rank_pattern={"q_proj": 4})
    .with_batch(rows=16, micro_rows=4, overlong="split")
    .with_optim(lr=2e-4, betas=(0.9, 0.95), eps=1e-6, max_grad_norm=None)
    .with_evaluation(every=10, patience=3)
    .with_saving(every=10, keep=1)
    .with_epochs(1.5)
    .with_seed(3)
    .with_backend("zero2")
)
"""
YAML = """
method: sft
model: {name: models/small, revision: "81e4321", quantization: nf4}
data:
  - {source: a.jsonl, format: messages, first: 100}
  - {source: b.csv, format: alpaca, repeat: 2}
eval_rows: 5
train_on: completion
adapter: {r: 8, alpha: 12, targets: [q_proj, v_proj], rank_pattern: {q_proj: 4}}
batch: {rows: 1.6e1, micro_rows: 4, overlong: split}
optim: {lr: 2e-4, betas: [0.9, 0.95], eps: 1e-6, max_grad_norm: null}
evaluation: {every: 10, patience: 3}
saving: {every: 10, keep: 1}
epochs: 1.5
seed: 3
backend: zero2
"""


def test_python_yaml_and_json_give_the_same_recipe(tmp_path):
    as_json = json.dumps(yaml.load(YAML, catalog.ExactNumbers))
    recipes = []
    for kind, text in (("py", PYTHON), ("yaml", YAML), ("json", as_json)):
        (tmp_path / f"r.{kind}").write_text(text)
        recipes.append(catalog.load(tmp_path / f"r.{kind}"))
    read = recipes[1]
    assert (recipes, {type(recipe) for recipe in recipes}) == ([read] * 3, {SFT})
    assert read.optim == Optim(lr=2e-4, betas=(0.9, 0.95), eps=1e-6, max_grad_norm=None)
    assert (read.batch.rows, read.model.revision) == (16, "81e4321")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6), ("2e-4", 2e-4), ("-1.5E+3", -1500.0), (".5e1", 5.0), ("7", 7), ("0.1", 0.1),
        *((f"{text}z", f"{text}z") for text in ("1e", "e5", "1e5x", "2024-01-02e", "0xe5")),
    ],
)  # fmt: skip
def test_yaml_reads_numbers_as_python_does_and_other_text_as_text(tmp_path, text, value):
    path = tmp_path / "r.yaml"
    path.write_text(f"method: sft\nmodel: {{config: {{model_type: llama, rope_theta: {text}}}}}\n")
    assert catalog.load(path).model.config == {"model_type": "llama", "rope_theta": value}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_the_same_in_yaml_and_json(name, tmp_path):
    recipe = catalog.resolve(name)
    fields = catalog.to_fields(recipe)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(fields))
    (tmp_path / "r.json").write_text(json.dumps(fields))
    assert catalog.load(tmp_path / "r.yaml") == recipe
    assert catalog.load(tmp_path / "r.json") == recipe
    assert fields["method"] == recipe.method
    assert type(recipe) is find_method(recipe.method)


def test_a_recipe_of_another_method_is_another_value():
    for method in (Pretrain, SFT):
        assert catalog.from_fields({"method": method.method}) == method()
    assert SFT() != Pretrain()


OVERRIDES: list[tuple[str, Any]] = [
    ("optim.lr=1e-4", 1e-4), ("optim.lr=1", 1.0), ("batch.rows=64", 64), ("batch.rows=6.4e1", 64),
    ("optim.betas=[0.8, 0.9]", (0.8, 0.9)), ("optim.max_grad_norm=null", None),
    ("optim.max_grad_norm=None", None), ("model.activation_checkpointing=True", True),
    ("model.name=a=b", "a=b"), ("model.name=123", "123"), ("model.name=nan", "nan"),
    ("model.name=true", "true"), ("model.revision=1e5", "1e5"), ("model.revision=007", "007"),
    ("model.revision=null", None), ("model.quantization=none", "none"),
    ('model.quantization="none"', "none"), ("optim.lr_scaling=none", "none"),
    ("model.activation_checkpointing=attention", "attention"), ("optim.betas=0.8,0.9", (0.8, 0.9)),
    ("optim.betas=(0.8, 0.9)", (0.8, 0.9)), ("optim.max_grad_norm=none", None),
    ("adapter.init_lora_weights=true", True), ("adapter.init_lora_weights=pissa", "pissa"),
    ("adapter.targets=[q_proj, v_proj]", ("q_proj", "v_proj")),
    ("adapter.targets=q_proj,v_proj", ("q_proj", "v_proj")),
    ("adapter.targets=attn.q, mlp.up", ("attn.q", "mlp.up")),
    ("adapter.targets=[qv]_proj", "[qv]_proj"), ("adapter.targets=(q|v)_proj", "(q|v)_proj"),
    ("adapter.targets=('q_proj',)", ("q_proj",)), ("adapter.modules_to_save=lm_head", ("lm_head",)),
    ("adapter.modules_to_save=[1, a]", ("1", "a")), ("adapter.layers_to_transform=3", (3,)),
    ("adapter.layers_to_transform=0,2", (0, 2)), ("data.0.source=1e5", "1e5"),
    ("data.0.subset=none", None), ("trackers=tensorboard", ("tensorboard",)),
    ("backend=none", "none"), ('model.revision="123"', "123"),
    ("adapter.targets=all-linear", "all-linear"), ('adapter.targets=["q_proj"]', ("q_proj",)),
    ("data.0.first=10", 10), ("trackers=[]", ()), ("max_steps=5", 5), ("train_on=all", "all"),
]  # fmt: skip
INSIDE = [
    ("optim.betas.1=0.95", "optim.betas", (0.9, 0.95)),
    ("adapter.rank_pattern.layers.0.q_proj=4", "adapter.rank_pattern", {"layers.0.q_proj": 4}),
    ("adapter.rank_pattern.q_proj=4", "adapter.rank_pattern", {"q_proj": 4}),
]
"""Overrides of a part of a field."""


def read(recipe: Recipe, path: str) -> Any:
    got: Any = recipe
    for part in path.split("."):
        got = got[int(part)] if part.isdigit() else getattr(got, part)
    return got


@pytest.mark.parametrize(
    ("pair", "path", "value"),
    [*((pair, pair.partition("=")[0], value) for pair, value in OVERRIDES), *INSIDE],
)
def test_an_override_sets_one_field_and_no_other(pair, path, value):
    before = catalog.resolve("qwen3_0_6b_lora")
    after = catalog.resolve("qwen3_0_6b_lora", [pair])
    got = read(after, path)
    assert (got, type(got)) == (value, type(value))
    outer = path.split(".")[0]
    for field in dataclasses.fields(before):
        if field.name != outer:
            assert getattr(after, field.name) == getattr(before, field.name)


def listed_values(hint: Any) -> list[Any]:
    """Values that a field lists in the reference: words, true and false, null."""
    if hint is type(None):
        return [None]
    if hint is bool:
        return [True, False]
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [value for kind in typing.get_args(hint) for value in listed_values(kind)]
    if typing.get_origin(hint) is typing.Annotated:
        return listed_values(typing.get_args(hint)[0])
    return []


def every_field() -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Path, type and definition of every field of a recipe with one source and an adapter."""
    sections = {
        "": SFT, "model.": Model, "data.0.": Data, "adapter.": LoRA, "batch.": Batch,
        "optim.": Optim, "kernels.": Kernels, "evaluation.": Evaluation, "saving.": Saving,
    }  # fmt: skip
    for prefix, kind in sections.items():
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            yield f"{prefix}{field.name}", hints[field.name], field


LISTED = [(path, value) for path, hint, _ in every_field() for value in listed_values(hint)]
FULL = SFT(Model("m")).with_data(Data("d.jsonl", "messages")).with_lora()


def test_every_value_that_a_field_lists_can_be_typed_as_it_is_listed():
    assert len(LISTED) > 70
    for path, value in LISTED:
        words = {True: "true", False: "false", None: "null"}
        text = words[value] if value is None or isinstance(value, bool) else str(value)
        got = read(catalog.override(FULL, [f"{path}={text}"]), path)
        assert (got, type(got)) == (value, type(value)), path


def test_every_default_can_be_typed_as_it_is_shown():
    shown = catalog.to_fields(FULL)
    for path, _, field in every_field():
        if dataclasses.is_dataclass(value := read(FULL, path)) or path in ("data", "eval_data"):
            continue
        place: Any = shown
        for part in path.split("."):
            place = place[int(part)] if part.isdigit() else place[part]
        got = read(catalog.override(FULL, [f"{path}={json.dumps(place)}"]), path)
        assert (got, type(got)) == (value, type(value)), field.name


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("model.quantization=null",
            "override: model.quantization: got None, expected none or nf4 or int8; did you mean "
            "'none'?"),
        ("model.name=", "override: model.name: String should have at least 1 character, got ''"),
        ("batch.rows=none", "override: batch.rows: Input should be a valid integer, got None"),
        ("adapter.modules_to_save=none",
            "override: adapter.modules_to_save: Input should be a valid tuple, got None"),
        ("max_steps=true", "override: max_steps: Input should be a number, got True"),
        ("data.0.first=true", "override: data.0.first: Input should be a number, got True"),
        ("adapter.rank_pattern={q_proj: true}",
            "override: adapter.rank_pattern.q_proj: Input should be a number, got True"),
        ("optim.lr=nan", "override: optim.lr: Input should be a finite number, got nan"),
        ("data.1.source=a", "data.1.source: there is no such place in the recipe"),
        ("optim.lr.x=1", "optim.lr.x: there is no such place in the recipe"),
        ("optim", "'optim': expected key=value"),
    ],
)  # fmt: skip
def test_an_invalid_override_is_refused(pair, problem):
    assert problems_of(catalog.resolve, "qwen3_0_6b_lora", [pair]) == (problem,)


def test_a_later_override_wins_over_an_earlier_one_and_both_over_the_file():
    recipe = catalog.resolve("qwen3_0_6b_lora", ["optim.lr=1", "adapter.r=4", "optim.lr=2"])
    assert (recipe.optim.lr, recipe.adapter) == (2.0, LoRA(r=4))
    assert catalog.resolve("qwen3_0_6b_lora", ["adapter=null"]).adapter is None
    for added in ("adapter.r=4", 'adapter={"r": 4}'):
        assert catalog.resolve("qwen3_0_6b_full", [added]).adapter == LoRA(r=4)


def test_every_problem_is_reported_with_its_path_and_a_model_is_named_or_built():
    fields = {
        "method": "sft",
        "model": {"name": "a", "quantisation": "nf4", "attention": "flash"},
        "data": [{"source": "a"}, {"source": "b", "format": "text", "first": 0}],
        "batch": {"rows": 2.5},
        "colour": "red",
    }
    assert sorted(problems_of(catalog.from_fields, fields, "mine.yaml")) == [
        "mine.yaml: batch.rows: Input should be a valid integer, got a number with a fractional "
        "part, got 2.5",
        "mine.yaml: colour: unknown key; known are model, data, eval_data, eval_rows, duplicates, "
        "data_checks, adapter, batch, optim, kernels, evaluation, saving, epochs, max_steps, seed, "
        "trackers, backend, stream_buffer, train_on, token_weight, eaft_alpha, label_smoothing",
        "mine.yaml: data.0.format: Field required",
        "mine.yaml: data.1.first: Input should be greater than 0, got 0",
        "mine.yaml: model.attention: got 'flash', expected sdpa or eager or flash_attention_2 or "
        "flex_attention",
        "mine.yaml: model.quantisation: unknown key; did you mean 'quantization'?",
    ]
    with pytest.raises(FinetuneError, match=r"give `name` .* or `config` .*, not both"):
        catalog.resolve("quickstart_base", ["model.name=a"])


def test_a_recipe_cannot_be_changed_in_place():
    recipe = catalog.resolve("quickstart")
    for value, name in ((recipe, "seed"), (recipe.optim, "lr")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


def test_only_what_changes_the_mathematics_is_a_difference():
    recipe = catalog.resolve("quickstart")
    free: Recipe = (
        recipe.with_backend("ddp").with_saving(every=1).with_evaluation(every=5)
        .with_epochs(9).with_steps(4).with_batch(micro_rows=1)
    )  # fmt: skip
    assert catalog.differences(recipe, free) == []
    assert catalog.differences(recipe, recipe.with_optim(lr=1.0).with_seed(4).with_lora(r=2)) == [
        "adapter.r: 16 -> 2",
        "optim.lr: 0.004 -> 1.0",
        "seed: 0 -> 4",
    ]


def test_recipes_of_the_working_directory_come_before_those_that_are_shipped(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart.yaml").write_text("# Mine.\nmethod: sft\nseed: 7\n")
    (tmp_path / "recipes/_part.yaml").write_text("method: sft\n")
    monkeypatch.chdir(tmp_path)
    assert catalog.resolve("quickstart") == SFT(seed=7)
    assert catalog.describe(catalog.names()["quickstart"]) == "Mine."
    assert catalog.names().keys() == SHIPPED.keys()
