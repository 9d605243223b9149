"""Tokens without a row: padding never needs one, added tokens get one, others are refused."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, Train, change_json, losses, problems_of, read, slow
from conversations import ADDED, CLOSE, conversation_loss, plain, thinking
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.models import vocabulary
from finetune.models.model import load_tokenizer
from finetune.planner import plan
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.shapes.architecture import Architecture

SHORT: dict[str, Any] = {"saving": {}, "evaluation": {}, "max_steps": 2}


@pytest.fixture
def train(train: Train) -> Train:
    return functools.partial(train, **SHORT)


def with_pad_outside(tiny: Tiny, folder: Path, in_config: bool = False) -> Path:
    """The tiny model with a tokenizer whose pad token was added, and has no row."""
    shutil.copytree(tiny.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    rows = read(folder / "config.json")["vocab_size"]
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= rows
    tokenizer.save_pretrained(folder)
    if in_config:
        change_json(folder / "config.json", pad_token_id=tokenizer.pad_token_id)
    return folder


@pytest.mark.parametrize(("adapter", "in_config"), [slow(None, True), ({"r": 4}, False)])
def test_a_pad_token_without_a_row_changes_nothing(tiny, tmp_path, train, adapter, in_config):
    usual = train("usual", adapter=adapter)
    folder = with_pad_outside(tiny, tmp_path / "padded", in_config)
    padded = train("outside", model={"name": str(folder)}, adapter=adapter)
    assert (losses(padded), losses(padded, "eval")) == (losses(usual), losses(usual, "eval"))
    loaded = ft.open_model(padded.root)
    assert len(ft.generate(loaded, ["the", "the cat and the dog"], max_new_tokens=3)) == 2
    merged = ft.export(padded, tmp_path / "merged", merge=adapter is not None)
    model, tokenizer = plain(merged), AutoTokenizer.from_pretrained(merged)
    batch = tokenizer(["the", "the cat and"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 2


def tied(tiny: Tiny, folder: Path) -> Path:
    sizes = {"intermediate_size": 192, "tie_word_embeddings": True}
    return tiny.other(folder, "llama", seed=5, **sizes)


def grown(base: Path, tokenizer: Any) -> Any:
    """The base in plain transformers, with the mean of its rows for each new token."""
    model = plain(base)
    tables = model.get_input_embeddings, model.get_output_embeddings  # which may be one
    means = [table().weight.detach().mean(0) for table in tables]
    old = model.config.vocab_size
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for table, mean in zip(tables, means, strict=True):
            table().weight[old:] = mean
    return model


WAYS: dict[str, Any] = {
    "rows": {"r": 4, "trainable_token_indices": ADDED},
    "tables": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
    "all weights": None,
}


@pytest.mark.parametrize(
    ("way", "is_tied"),
    [
        ("rows", True),
        ("all weights", False),
        slow("rows", False),
        slow("tables", False),
        slow("tables", True),
        slow("all weights", True),
    ],
)
def test_added_tokens_start_as_the_mean_and_are_in_every_result(
    tiny, tmp_path, train, way, is_tied
):
    base = tied(tiny, tmp_path / "base") if is_tied else tiny.model
    data = thinking(tiny, tmp_path)
    model = {"name": str(base), "add_tokens": ADDED}
    given = {"batch": {"rows": 48, "micro_rows": 8}, "optim": {"lr": 1e-2, "warmup": 0}}
    run = train(**data, **given, adapter=WAYS[way], model=model)
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    before = grown(base, tokenizer)
    size = before.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(ADDED) == [*range(size - 3, size)]
    assert abs(losses(run)[0] - conversation_loss(before, tokenizer, data["data"])) < CLOSE
    trained = losses(run, "eval")[-1]
    merged = plain(ft.export(run, tmp_path / "merged", merge=WAYS[way] is not None))
    assert merged.config.vocab_size == len(tokenizer)
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied
    results = [merged]
    if WAYS[way] is not None:
        folder = ft.export(run, tmp_path / "adapter")
        results += [AutoPeftModelForCausalLM.from_pretrained(folder).eval()]
        results += [ft.open_model(folder).model]
    for each in [*results, ft.open_model(run.root).model]:
        assert abs(conversation_loss(each, tokenizer, data["eval_data"]) - trained) < CLOSE
    if way == "rows":
        tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
        (name, *other) = [key for key in tensors if "trainable_tokens_delta" in key]
        assert (len(other), tensors[name].shape) == (0 if is_tied else 1, (3, 64))
        assert not torch.equal(tensors[name], before.get_input_embeddings().weight[-3:])


def test_a_run_with_added_tokens_goes_on_where_it_stopped(tiny, tmp_path, train):
    sections = thinking(tiny, tmp_path) | {
        "model": {"add_tokens": ADDED}, "adapter": WAYS["rows"],
        "optim": {"schedule": "constant"}, "saving": {"every": 2},
    }  # fmt: skip
    straight = train("straight", **sections, max_steps=4)
    train("cut", **sections)
    assert losses(train("cut", resume=True, **sections, max_steps=4)) == losses(straight)


def test_tokens_of_the_tokenizer_that_have_no_row_are_named(tiny, tmp_path, train):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    tokenizer.add_tokens(ADDED)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sections = thinking(tiny, tmp_path) | {"model": {"tokenizer": str(tmp_path / "tokenizer")}}
    rows = len(tokenizer) - 3
    assert problems_of(train, "refused", **sections) == (
        f"model.tokenizer: '{tmp_path / 'tokenizer'}' gave the token {rows + 2}, but the model has "
        f'{rows}; tokens without a row: "<think>", "</think>", " a b"; add rows with '
        'model.add_tokens=["<think>", "</think>", " a b"], or name the tokenizer that belongs to '
        "the model",
    )
    sections["model"]["add_tokens"] = ADDED
    named = train("named", **sections)
    own = train("own", **sections | {"model": {"add_tokens": ADDED}})
    assert losses(named) == losses(own)


WAYS_OUT = (
    'set adapter.trainable_token_indices=["<x>", "<y>"] to train these rows, '
    "adapter.modules_to_save=[embed_tokens, lm_head] to train all rows, or adapter=null"
)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (
            {"r": 4},
            f'model.add_tokens: the adapter would not train the rows of "<x>", "<y>"; {WAYS_OUT}',
        ),
        (
            {"trainable_token_indices": ["<x>"]},
            'model.add_tokens: the adapter does not train the rows of "<y>" in model.embed_tokens, '
            f"which would stay the mean of the others; {WAYS_OUT}",
        ),
        (
            {"modules_to_save": ["embed_tokens"]},
            'model.add_tokens: the adapter does not train the rows of "<x>", "<y>" in lm_head, '
            f"which would stay the mean of the others; {WAYS_OUT}",
        ),
        (
            {"trainable_token_indices": ["<x>", "<y>", "<z>", 9999]},
            "adapter.trainable_token_indices: the tokenizer has no token '<z>'; add it with "
            "model.add_tokens",
        ),
    ],
)
def test_rows_that_would_never_be_trained_are_refused(train, adapter, problem):
    assert problems_of(train, adapter=adapter, model={"add_tokens": ["<x>", "<y>"]})[0] == problem


def test_rows_of_known_tokens_can_be_trained_alone(tiny, tmp_path, train):
    run = train("run", adapter={"r": 4, "trainable_token_indices": ["<|im_end|>", 7]})
    merged, base = plain(ft.export(run, tmp_path / "merged", merge=True)), plain(tiny.model)
    for table in ("get_input_embeddings", "get_output_embeddings"):
        moved = (getattr(merged, table)().weight != getattr(base, table)().weight).any(1)
        assert moved.nonzero().flatten().tolist() == [2, 7]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_plan_counts_the_rows_that_are_trained(tiny, tmp_path, is_tied):
    base = tied(tiny, tmp_path / "base") if is_tied else tiny.model
    counted = {}
    for name, tokens in (("without", []), ("with", ["<|im_end|>", 7, 9])):
        adapter = {"r": 4, "trainable_token_indices": tokens}
        fields = tiny.fields(model={"name": str(base)}, adapter=adapter)
        settled = plan(catalog.from_fields(fields), "single")
        workload = workload_of(settled, model_source(settled.recipe).shape)
        counted[name] = workload.adapter.parameters
    assert counted["with"] - counted["without"] == 3 * 64 * (1 if is_tied else 2)


def test_a_token_is_found_as_it_is_written(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    size = len(tokenizer)
    vocabulary.add_tokens(tokenizer, ["\n\n\n", " <b> ", "<|im_end|>"])
    assert len(tokenizer) == size + 2
    assert tokenizer("the\n\n\n <b> x").input_ids[-3:-1] == [size, size + 1]
    recipe = catalog.resolve("quickstart", ['model.add_tokens=["\\n\\n\\n", " <b> "]'])
    assert recipe.model.add_tokens == ("\n\n\n", " <b> ")


def test_a_plan_counts_the_rows_of_added_tokens(tiny, tmp_path):
    def shape_of(folder: Path, *added: str) -> Architecture:
        return model_source(ft.SFT(ft.Model(str(folder), add_tokens=added))).shape

    plain, grown = shape_of(tiny.model), shape_of(tiny.model, "<x>", "<y>", "<|im_end|>")
    tokenizer = load_tokenizer(ft.SFT(ft.Model(str(tiny.model), add_tokens=("<x>", "<y>"))))
    assert grown.vocab == vocabulary.rows_needed(tokenizer) == plain.vocab + 2
    assert grown.parameters == plain.parameters + 2 * 2 * plain.hidden  # embedding and head
    roomy = Path(shutil.copytree(tiny.model, tmp_path / "roomy"))
    change_json(roomy / "config.json", vocab_size=plain.vocab + 9)
    assert shape_of(roomy, "<x>", "<y>").vocab == plain.vocab + 9
    (roomy / "tokenizer.json").unlink()
    assert shape_of(roomy, "<x>", "<y>").vocab == plain.vocab + 11


def test_special_tokens_of_a_recipe_replace_those_of_the_tokenizer(tiny):
    known = AutoTokenizer.from_pretrained(tiny.model).get_vocab()
    end = next(token for token in known if token.isalpha())
    given = {"eos_token": end, "bos_token": end}
    tokenizer = load_tokenizer(catalog.from_fields(tiny.fields(model={"special_tokens": given})))
    assert (tokenizer.eos_token, tokenizer.bos_token_id) == (end, known[end])
    wrong = tiny.fields(model={"special_tokens": {"eos_token": "<nowhere>"}})
    with pytest.raises(ft.FinetuneError, match="special_tokens: eos_token=<nowhere> is not in"):
        load_tokenizer(catalog.from_fields(wrong))
