"""Tuners of PEFT other than LoRA train, are the same on every engine, and load in plain PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runs, Tiny, Train, apart, losses, problems_of, slow_but
from peft import PeftConfig, PeftModel
from test_optim import FREE
from transformers import AutoModelForCausalLM

import finetune as ft
from finetune import catalog
from finetune.cache import cache
from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.data.rows.collate import collate
from finetune.models.adapters import tuner_config
from finetune.models.model import load_tokenizer
from finetune.recipe import LoRA
from finetune.runs.run import Run

TUNERS: dict[str, dict[str, Any]] = {
    "ia3": {
        "targets": ["k_proj", "v_proj", "down_proj"],
        "arguments": {"feedforward_modules": ["down_proj"]},
    },
    "vera": {"arguments": {"r": 8}, "targets": ["q_proj", "v_proj"]},
    "oft": {"arguments": {"oft_block_size": 4}},
    "boft": {"arguments": {"boft_block_size": 4}, "targets": ["q_proj", "o_proj"]},
    "loha": {"arguments": {"r": 4}},
    "lokr": {"arguments": {"r": 4}},
    "miss": {"arguments": {"r": 4}},
    "ln_tuning": {},
    "hra": {"arguments": {"r": 4}},
    "fourierft": {"arguments": {"n_frequency": 32}},
    "road": {"arguments": {"group_size": 16}},
    "randlora": {"arguments": {"r": 4}},
}


def section(kind: str) -> dict[str, Any]:
    return {"kind": kind, **TUNERS[kind]}


def loss_of(run: Run, tiny: Tiny) -> float:
    """The loss of a result on the held-out rows, by PEFT and transformers alone."""
    recipe = catalog.load(run.recipe)
    rows = prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).eval
    batch = collate(rows, range(len(rows)), 0, "cpu")
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.final).eval()
    given = {"attention_mask": batch.attention_mask, "labels": batch.labels}
    with torch.no_grad():
        return float(model(batch.ids, **given).loss)


@pytest.mark.parametrize("kind", slow_but(("ia3", "oft"), TUNERS))
def test_a_tuner_trains_and_plain_peft_computes_its_loss(
    kind: str, train: Train, tiny: Tiny, tmp_path: Path
):
    short = {"max_steps": 2, "evaluation": {"every": 1}, "saving": {"every": 1}}
    run = train(adapter=section(kind), optim={"lr": 3e-2}, **short)
    first, last = losses(run, "eval")
    assert PeftConfig.from_pretrained(str(run.final)).peft_type.value.lower() == kind
    assert first != last
    assert loss_of(run, tiny) == pytest.approx(min(first, last), abs=2e-5)
    with pytest.raises(ft.FinetuneError, match="only LoRA is merged here"):
        ft.export(run, tmp_path / "merged", merge=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp_full_shard", "zero2", "zero3"])
@pytest.mark.parametrize("kind", [*TUNERS, "dora"])
def test_a_tuner_on_two_processes_is_that_of_one(
    kind: str, backend: str, tiny: Tiny, runs_of: Runs
):
    adapters = {each: section(each) for each in TUNERS} | {"dora": {"r": 4, "use_dora": True}}
    given: dict[str, Any] = {"batch": {"micro_rows": 4}, "max_steps": 2, "evaluation": {"every": 2}}
    recipes = {each: tiny.fields(adapter=adapter, **given) for each, adapter in adapters.items()}
    one, two = (runs_of(each, recipes)[kind] for each in ("single", backend))
    assert apart(one, two) < 1e-5
    assert apart(one, two, "eval") < 1e-5


def test_a_resumed_tuner_continues_bit_for_bit(train: Train):
    given = {"adapter": section("vera"), "optim": FREE}
    straight = losses(train("straight", **given))
    train("cut", **given, max_steps=3)
    assert losses(train("cut", **given, resume=True)) == straight


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (
            {"kind": "lroa"},
            "adapter.kind: PEFT has no tuner 'lroa' of modules; did you mean 'road'",
        ),
        (
            {"kind": "wxyz"},
            "adapter.kind: PEFT has no tuner 'wxyz' of modules; it has adalora,",
        ),
        ({"kind": "prompt_tuning"}, "adapter.kind: prompt_tuning adds tokens to each row"),
        ({"kind": "adalora"}, "adapter.kind: adalora changes its weights' number while it trains"),
        ({"kind": "ia3", "layers_to_transform": (1,)}, "adapter.layers_to_transform: ia3 has no"),
        ({"kind": "oft", "arguments": {"block_size": 4}}, "adapter.arguments: block_size: oft has"),
        ({"kind": "oft", "arguments": {"r": 4, "oft_block_size": 4}}, "adapter.arguments: oft: "),
    ],
)
def test_what_a_tuner_cannot_do_is_refused(adapter: dict[str, Any], problem: str):
    assert problems_of(tuner_config, LoRA(**adapter))[0].startswith(problem)


def test_a_tuner_that_needs_more_than_tokens_is_refused(train: Train):
    (problem,) = problems_of(train, adapter={"kind": "poly", "targets": ["q_proj"]})
    assert problem.startswith("adapter.kind: the forward pass of a few tokens fails (")
    assert problem.endswith("; use lora")


def test_a_tuner_has_no_field_of_a_lora(tiny: Tiny):
    for adapter in ({"kind": "ia3", "r": 4}, {"arguments": {"r": 4}}):
        with pytest.raises(ft.FinetuneError, match=r"its own in `arguments`|use them"):
            catalog.from_fields(tiny.fields(adapter=adapter))
