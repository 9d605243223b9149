"""Rows, packed or not, train as in plain transformers, on any number of processes."""

from typing import Any

import pytest
import torch
from conftest import FP32, assert_same_losses, cut_off, equal_state, losses
from transformers import AutoModelForCausalLM

import finetune as ft
from finetune import catalog
from finetune.cache import cache
from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.data.rows.order import rows_of_step
from finetune.data.rows.store import Rows
from finetune.models.model import load_tokenizer

PACKED: dict[str, Any] = {
    "batch": {"rows": 4, "micro_rows": 1, "packing": True},
    "adapter": {"r": 8, "dropout": 0.1},
    "optim": {"lr": 5e-3},
}


def rows_of(recipe: ft.Recipe) -> Rows:
    return prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).train


def test_the_loss_of_a_step_is_that_of_its_documents_in_plain_transformers(tiny, train):
    run = train(batch=PACKED["batch"], max_steps=1)
    recipe = catalog.load(run.recipe)
    rows = rows_of(recipe)
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    total, terms = 0.0, 0
    for index in rows_of_step(0, len(rows), 4, recipe.seed):
        for number in rows.numbers(int(index)):
            ids, trained = rows.documents.document(int(number))
            ids = torch.tensor(ids[None], dtype=torch.int64)
            labels = torch.where(torch.tensor(trained[None]), ids, -100)
            terms += int(trained.sum())
            with torch.no_grad():
                total += model(ids, labels=labels).loss.item() * int(trained.sum())
    (first,) = run.read_metrics("train")
    assert first["trained_tokens"] == terms
    assert abs(first["loss"] - total / terms) < FP32
    assert first["slots"] == first["real_tokens"]  # nothing is padded
    (start,) = run.read_metrics("start")
    assert (start["train_rows"], start["packing"]) == (len(rows), True)


def test_the_cut_into_micro_batches_does_not_change_the_losses(train):
    sections = PACKED | {"adapter": {"r": 8}}
    assert_same_losses(
        *(
            train(str(micro), **sections | {"batch": PACKED["batch"] | micro}, max_steps=3)
            for micro in ({"micro_rows": 4}, {"micro_tokens": 300})
        )
    )


def test_padded_micro_batches_may_be_given_in_tokens(run_of, train):
    tokens = train(batch={"micro_tokens": 256})
    assert_same_losses(run_of(), tokens)
    assert all(record["slots"] <= 256 * 4 for record in tokens.read_metrics("train"))


def test_a_packed_run_resumes_bit_for_bit_and_with_recomputed_activations(run_of, train, tmp_path):
    """Which know where documents end."""
    straight = run_of(**PACKED)
    resumed = cut_off(straight, tmp_path / "resumed", 3)
    train("resumed", resume=True, **PACKED)
    assert losses(resumed) == losses(straight)
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))
    assert_same_losses(straight, train("again", **PACKED, model={"activation_checkpointing": True}))


def test_packed_losses_on_two_processes_are_those_of_one(run_of):
    sections = PACKED | {"batch": PACKED["batch"] | {"micro_tokens": 200}}
    assert_same_losses(run_of(**sections), run_of("ddp", **sections))


def test_a_micro_batch_that_holds_no_row_is_refused(train):
    told = r"micro_tokens: 100 tokens cannot hold a row of .*=128"
    with pytest.raises(ft.FinetuneError, match=told):
        train(batch={"micro_tokens": 100})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="flex_attention can train there")
def test_flex_attention_is_refused_on_a_cpu(train):
    with pytest.raises(ft.FinetuneError, match="flex_attention of PyTorch cannot train on a CPU"):
        train(model={"attention": "flex_attention"})
