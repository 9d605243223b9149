"""The kernels compute what plain transformers and PEFT do, on one process and on several."""

from typing import Any

import pytest
from conftest import FP32, apart, assert_same_losses, copy_of, losses, write_recipe

import finetune as ft
from finetune import catalog

PLAIN = {
    "kernels": {
        "head": "whole", "lora": "separate", "norm": "plain", "activation": "plain",
        "rotary": "plain",
    }
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"r": 8}, "optim": {"lr": 5e-3}},
    "nf4": {"adapter": {"r": 8}, "model": {"quantization": "nf4"}, "optim": {"lr": 5e-3}},
}
HERE = [*((kind, "single") for kind in KINDS), ("lora", "fsdp_full_shard")]
"""`make prove` compares every other backend with one process."""


@pytest.mark.parametrize(("kind", "backend"), HERE)
def test_losses_are_those_of_plain_transformers_and_peft(run_of, kind, backend):
    assert_same_losses(run_of(**KINDS[kind], **PLAIN), run_of(backend, **KINDS[kind]))


@pytest.mark.slow
def test_compiled_kernels_train_the_same_and_are_kept(run_of, tiny, finetune, tmp_path):
    fields = tiny.fields(**KINDS["lora"], kernels={"pointwise": "compiled"})
    done = finetune(
        "launch", write_recipe(tmp_path / "r.json", fields), "--backend", "ddp", "--processes",
        "2", "--precision", "fp32", "--output", tmp_path / "run",
        env={"FINETUNE_CACHE": str(tmp_path / "cache")},
    ).passed()  # fmt: skip
    assert "kernels.pointwise: compiled, for " in done.output
    assert apart(run_of(**KINDS["lora"], **PLAIN), ft.Run(tmp_path / "run")) < FP32
    assert list((tmp_path / "cache" / "compiled").rglob("*.so"))


def test_a_run_continues_with_other_kernels(run_of, train, tmp_path):
    copy_of(run_of(**KINDS["lora"]), tmp_path / "run")
    assert len(losses(train(resume=True, **KINDS["lora"], **PLAIN, max_steps=8))) == 8


HEAD = "kernels.head: whole, because the head has an adapter"


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        ({"dropout": 0.1}, "kernels.lora: separate, because adapter.dropout"),
        ({"targets": ["q_proj", "lm_head"]}, HEAD),
        ({"targets": ".*(q_proj|lm_head)"}, HEAD),
    ],
)
def test_the_plan_and_the_run_say_what_falls_back(tiny, train, capsys, adapter, told):
    sections = {"max_steps": 1, "adapter": {"r": 4} | adapter}
    assert told in ft.plan(catalog.from_fields(tiny.fields(**sections)), "single").explain()
    train(**sections)
    assert told in " ".join(capsys.readouterr().out.split())
