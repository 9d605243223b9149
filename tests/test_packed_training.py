"""Packed rows train as they should on any number of processes, and go on where they stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, write_recipe
from test_backends import FP32, equal_state, largest, launch, losses

import finetune as ft
from finetune import catalog
from finetune.cache import cache
from finetune.data.chat.render import load_chat
from finetune.data.collate import collate
from finetune.data.order import rows_of_step
from finetune.data.prepare import prepare
from finetune.errors import FinetuneError
from finetune.models.model import load_tokenizer
from finetune.runs.run import Run

PACKED: dict[str, Any] = {
    "batch": {"rows": 4, "micro_rows": 1, "packing": True},
    "adapter": {"r": 8, "dropout": 0.1},
    "optim": {"lr": 5e-3},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "in-process-cache"))


def train(tiny: Tiny, place: Path, resume: bool = False, **sections: Any) -> Run:
    recipe = catalog.from_fields(tiny.fields(**sections))
    return ft.train(recipe, precision="fp32", output=place, resume=resume)


def test_the_loss_of_a_step_is_that_of_its_documents_in_plain_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    run = train(tiny, tmp_path / "run", batch=PACKED["batch"], max_steps=1)
    recipe = catalog.load(run.recipe)
    rows = prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).train
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


def test_the_cut_into_micro_batches_does_not_change_the_losses(tiny, tmp_path):
    plain = {**PACKED, "adapter": {"r": 8}}
    whole = train(
        tiny, tmp_path / "whole", **plain | {"batch": PACKED["batch"] | {"micro_rows": 4}}
    )
    cuts = {"rows": {"micro_rows": 1}, "tokens": {"micro_tokens": 300}}
    for name, cut in cuts.items():
        run = train(tiny, tmp_path / name, **plain | {"batch": PACKED["batch"] | cut})
        assert largest(losses(whole), losses(run)) < FP32
        assert largest(losses(whole, "eval"), losses(run, "eval")) < FP32


def test_padded_micro_batches_may_be_given_in_tokens(tiny, tmp_path):
    rows = train(tiny, tmp_path / "rows", batch={"micro_rows": 1})
    tokens = train(tiny, tmp_path / "tokens", batch={"micro_tokens": 256})
    assert largest(losses(rows), losses(tokens)) < FP32
    assert all(record["slots"] <= 256 * 4 for record in tokens.read_metrics("train"))


def test_recomputed_activations_know_where_documents_end(tiny, tmp_path):
    kept = train(tiny, tmp_path / "kept", **PACKED)
    model = {"activation_checkpointing": True}
    again = train(tiny, tmp_path / "again", **PACKED, model={"name": str(tiny.model)} | model)
    assert largest(losses(kept), losses(again)) < FP32


def test_a_packed_run_resumes_bit_for_bit(tiny, tmp_path):
    straight = train(tiny, tmp_path / "straight", **PACKED)
    shutil.copytree(straight.root, tmp_path / "resumed")
    resumed = Run(tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(6))
    train(tiny, resumed.root, resume=True, **PACKED)
    assert losses(resumed) == losses(straight)
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))


@pytest.mark.parametrize(
    ("backend", "micro"),
    [
        ("ddp", {"micro_tokens": 200}),
        ("fsdp_full_shard", {"micro_rows": 1}),
        pytest.param("zero3", {"micro_tokens": 200}, marks=pytest.mark.slow),
        pytest.param("zero3", {"micro_rows": 1}, marks=pytest.mark.slow),
    ],
)
def test_packed_losses_on_two_processes_are_those_of_one(tiny, finetune, tmp_path, backend, micro):
    sections = PACKED | {"batch": PACKED["batch"] | micro}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    launch(finetune, recipe, backend, tmp_path / "together")
    together = Run(tmp_path / "together")
    alone = train(tiny, tmp_path / "alone", **sections)
    assert largest(losses(alone), losses(together)) < FP32
    assert largest(losses(alone, "eval"), losses(together, "eval")) < FP32


def test_a_micro_batch_that_holds_no_row_is_refused(tiny, tmp_path):
    with pytest.raises(
        FinetuneError, match=r"micro_tokens: 100 tokens cannot hold a row of .*=128"
    ):
        train(tiny, tmp_path / "run", batch={"micro_tokens": 100})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="flex_attention can train there")
def test_flex_attention_is_refused_on_a_cpu(tiny, tmp_path):
    model = {"name": str(tiny.model), "attention": "flex_attention"}
    with pytest.raises(FinetuneError, match="flex_attention of PyTorch cannot train on a CPU"):
        train(tiny, tmp_path / "run", model=model)


def test_the_batch_of_a_packed_run_collates_to_its_documents(tiny, tmp_path):
    recipe = catalog.from_fields(tiny.fields(**PACKED))
    rows = prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).train
    batch = collate(rows, rows_of_step(0, len(rows), 4, 0), 0, "cpu")
    assert batch.boundaries is not None
    assert batch.boundaries.longest <= 128
    assert batch.ids.numel() == batch.real_tokens <= 4 * 128
