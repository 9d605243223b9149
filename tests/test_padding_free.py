"""A micro-batch side by side is the step that it is padded, without the padding."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from architectures import FIELDS, SIZES
from conftest import FP32, Train, apart, assert_same_losses, cut_off, largest, losses
from documents import documents_of
from transformers import AutoConfig

import finetune as ft
from finetune import catalog
from finetune.data.rows.pack_statistics import filling_notes, real_share
from finetune.data.rows.store import single_rows
from finetune.planner.padding import padding as layout_of

LORA: dict[str, Any] = {"adapter": {"r": 8}, "optim": {"lr": 5e-3}}
SIDE_BY_SIDE = "side by side without padding, each attending to itself alone"
PADDED = "padded to the longest row of a micro-batch: "


def column(run: ft.Run, name: str) -> list[Any]:
    return [record[name] for record in run.read_metrics("train")]


@pytest.fixture
def padded(run_of: Train) -> ft.Run:
    return run_of(**LORA, batch={"micro_rows": 4, "padding_free": False})


@pytest.mark.parametrize(
    ("batch", "model"),
    [
        ({"micro_rows": 4}, {"activation_checkpointing": True}),
        ({"micro_tokens": 300}, {}),
    ],
)
def test_steps_side_by_side_are_those_of_padded_rows(train, padded, batch, model):
    free = train(**LORA, batch=batch, model=model)
    assert_same_losses(padded, free)
    for name in ("trained_tokens", "real_tokens", "lr", "epoch"):
        assert column(padded, name) == column(free, name)
    assert column(free, "slots") == column(free, "real_tokens")
    assert sum(column(padded, "slots")) > sum(column(padded, "real_tokens"))
    told = [next(run.read_metrics("start"))["padding"] for run in (padded, free)]
    assert told == [f"{PADDED}batch.padding_free=false", SIDE_BY_SIDE]


def test_a_padded_run_goes_on_side_by_side(train, tmp_path, padded):
    cut_off(padded, tmp_path / "run", 3)
    run = train(resume=True, **LORA, batch={"micro_rows": 4})
    assert losses(run)[:3] == losses(padded)[:3]
    assert apart(padded, run) < FP32
    assert column(run, "slots")[3:] == column(run, "real_tokens")[3:]


def test_a_model_that_mixes_documents_is_padded_with_the_reason(tiny, train, capsys):
    config = {
        "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "vocab_size": 320,
    }  # fmt: skip
    run = train(model={"name": None, "config": config, "tokenizer": str(tiny.model)}, max_steps=1)
    (start,) = run.read_metrics("start")
    assert start["padding"].startswith(
        f"{PADDED}concatenated documents have not been shown to be exact for 'falcon' models"
    )
    (step,) = run.read_metrics("train")
    assert step["slots"] > step["real_tokens"]
    assert "padded to the longest row" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gpt_oss"])
def test_a_model_with_a_state_or_sinks_trains_as_on_padded_rows(tiny, train, kind):
    """The state runs once per document, also where activations are recomputed beside an adapter."""
    config = SIZES | FIELDS[kind] | {"model_type": kind, "vocab_size": 320}
    told: list[list[float]] = []
    for padding_free in (False, "auto"):
        attention = "eager" if kind == "gpt_oss" and padding_free is False else "sdpa"
        model = {
            "name": None, "config": config, "tokenizer": str(tiny.model), "attention": attention,
            "activation_checkpointing": kind == "qwen3_5_text",
        }  # fmt: skip
        batch = {"micro_rows": 4, "padding_free": padding_free}
        run = train(str(padding_free), model=model, batch=batch, max_steps=3)
        told.append([*losses(run), *losses(run, "eval")])
    assert largest(*told) < FP32


FALCON = AutoConfig.for_model("falcon").to_dict()


def test_padded_rows_report_what_would_fill_their_slots():
    """Micro-batches of 2 of the rows of 8, 4, 2 and 1 tokens: 15 of 2 x 8 + 2 x 2 slots."""
    rows = single_rows(documents_of((np.ones(n, np.int32), np.ones(n, bool)) for n in (8, 4, 2, 1)))
    recipe = ft.SFT().with_batch(rows=4, micro_rows=2, max_length=8)
    assert real_share(rows, recipe, 1) == 15 / 20
    assert real_share(rows, recipe.with_batch(micro_rows=1), 1) == 1

    def told(recipe: ft.SFT, fields: Mapping[str, Any] = FALCON) -> list[str]:
        return filling_notes(rows, recipe, layout_of(recipe, fields), 1)

    start = "batch: 75% of the token slots are tokens, the others are padding; "
    # By 8 tokens they are 8, 2 x 4 and 1 slots, which is 88 %.
    assert told(recipe) == [f"{start}batch.micro_rows=1 fills them, one row in each forward pass"]
    llama = {"model_type": "llama"}
    assert told(recipe, llama) == []
    side_by_side = " concatenates rows without padding"
    assert told(recipe.with_batch(padding_free=False), llama) == [
        f"{start}batch.padding_free=auto{side_by_side}"
    ]
    eager = recipe.with_model(ft.Model(attention="eager"))
    assert told(eager, llama) == [f"{start}model.attention=sdpa{side_by_side}"]
    assert told(recipe.with_batch(micro_rows=1)) == []


def test_micro_batches_by_tokens_are_named_where_they_pad_less():
    """By four rows 4 x 16 and 4 x 4 slots; by 16 tokens 16, 4 x 4 and 3 x 4."""
    sizes = (16, 4, 4, 4, 4, 4, 4, 4)
    rows = single_rows(documents_of((np.ones(n, np.int32), np.ones(n, bool)) for n in sizes))
    recipe = ft.SFT().with_batch(rows=8, micro_rows=4, max_length=16)
    assert real_share(rows, recipe, 1) == 44 / 80
    assert filling_notes(rows, recipe, layout_of(recipe, FALCON), 1) == [
        "batch: 55% of the token slots are tokens, the others are padding; batch.micro_tokens=16 "
        "raises this share to 100%"
    ]


def test_the_layout_is_free_to_change_when_a_run_goes_on(tiny):
    recipe = catalog.from_fields(tiny.fields())
    assert recipe.batch.padding_free == "auto"
    for value in (True, False):
        assert catalog.differences(recipe, recipe.with_batch(padding_free=value)) == []
