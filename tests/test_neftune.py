"""Noise on embeddings is that of the seed, step, document and place, on every backend."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny, assert_same_losses, losses, problems_of
from families import build

import finetune as ft
from finetune import catalog
from finetune.data.rows.collate import collate, with_noise
from finetune.data.rows.embedding_noise import Noise
from finetune.data.rows.store import Documents, Rows
from finetune.kernels.philox import philox
from finetune.models import embedding_noise
from finetune.models.embedding_noise import add_noise

ALPHA, WIDTH, KEY = 40.0, 64, (3, 5)
NOISY: dict[str, Any] = {"model": {"neftune_alpha": ALPHA}, "max_steps": 3}
LENGTHS = (5, 3, 9)


def by_hand(document: int) -> torch.Tensor:
    """(tokens, width): one counter of four words after another, as numbers from -1 to 1."""
    tokens, blocks = LENGTHS[document], WIDTH // 4
    found = torch.empty(tokens, WIDTH, dtype=torch.float64)
    for place in range(tokens):
        for block in range(blocks):
            counters = [torch.tensor([each]) for each in (block, place, document, 0)]
            for number, word in enumerate(philox(counters, KEY)):
                found[place, number * blocks + block] = (2 * int(word) + 1) / 2**32 - 1
    return found * ALPHA / (tokens * WIDTH) ** 0.5


def rows_of(packed: bool, free: bool = False) -> Rows:
    offsets = np.cumsum([0, *LENGTHS])
    ids = np.arange(3, 3 + offsets[-1], dtype=np.int32)
    origins = np.zeros((3, 2), np.int64)
    documents = Documents(ids, np.ones(len(ids), bool), offsets, origins)
    return Rows(documents, np.array([2, 0, 1]), np.array([0, 1, 2, 3]), packed, free)


@pytest.mark.parametrize("layout", ["padded", "free", "packed"])
def test_each_token_has_the_noise_of_its_place_in_any_layout(layout: str):
    rows = rows_of(layout == "packed", layout == "free")
    chosen = np.array([0, 2])  # documents 2 and 1
    batch = with_noise(collate(rows, chosen, 0, "cpu"), rows, chosen, ALPHA, KEY)
    assert batch.noise is not None
    found = embedding_noise.with_noise(torch.zeros(*batch.ids.shape, WIDTH), batch.noise)
    wanted = torch.zeros(2, 9, WIDTH, dtype=torch.float64)
    wanted[0], wanted[1, :3] = by_hand(2), by_hand(1)
    if layout != "padded":
        wanted = torch.cat([by_hand(2), by_hand(1)])[None]
    assert torch.allclose(found.double(), wanted, atol=1e-6)


def test_the_model_reads_embeddings_with_noise_in_training_only(monkeypatch):
    rows, chosen = rows_of(False), np.array([0])
    batch = with_noise(collate(rows, chosen, 0, "cpu"), rows, chosen, ALPHA, KEY)
    model = build("llama", hidden_size=WIDTH)
    plain = model(input_ids=batch.ids).logits
    noisy = model(inputs_embeds=model.get_input_embeddings()(batch.ids) + by_hand(2)[None].float())
    add_noise(model.get_input_embeddings())
    monkeypatch.setattr(Noise, "current", batch.noise)
    assert torch.equal(model.eval()(input_ids=batch.ids).logits, plain)
    assert torch.allclose(model.train()(input_ids=batch.ids).logits, noisy.logits, atol=1e-5)


def test_training_does_not_depend_on_batches_and_evaluations_have_no_noise(train):
    reference = train("reference", **NOISY)
    assert_same_losses(reference, train("one", **NOISY, batch={"micro_rows": 1}))
    assert_same_losses(reference, train("padded", **NOISY, batch={"padding_free": False}))
    still = {"optim": {"lr": 1e-30, "weight_decay": 0.0}, "batch": {"rows": 48}}
    noisy, plain = train("noisy", **NOISY, **still), train("plain", max_steps=3, **still)
    assert losses(noisy, "eval") == losses(plain, "eval")
    assert losses(plain)[1] == pytest.approx(losses(plain)[0], abs=1e-6)  # the same rows again
    assert abs(losses(noisy)[0] - losses(plain)[0]) > 1e-3
    assert abs(losses(noisy)[0] - losses(noisy)[1]) > 1e-3


def test_methods_that_compare_with_a_pass_without_noise_refuse_it(tiny: Tiny, prompts):
    fields = tiny.fields(method="kto", **NOISY)
    (problem,) = (
        each
        for each in problems_of(ft.plan, catalog.from_fields(fields), "single")
        if "neftune" in each
    )
    assert problem.startswith("model.neftune_alpha: kto compares log-probabilities")
