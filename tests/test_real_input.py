"""A real pretrained model learns from real data, by the same amount under every engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Train, losses

from finetune.runs.run import Run

FALL = 2e-5
"""Evaluation losses after ten steps of lr 5e-3 in fp32: rounding that AdamW amplifies."""


@pytest.fixture
def learned(assets: Path, run_of: Train) -> Callable[[str], Run]:
    """stories260K after ten LoRA steps on GSM8K, on a backend; trained once each."""
    data = {"format": "question_answer"}
    fields = {
        "method": "sft",
        "model": {"name": str(assets / "models/stories260K"), "chat_template": "plain"},
        "data": [data | {"source": str(assets / "data/gsm8k/train.jsonl"), "first": 400}],
        "eval_data": [data | {"source": str(assets / "data/gsm8k/test.jsonl"), "first": 24}],
        "adapter": {"r": 8},
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 192, "overlong": "truncate"},
        "optim": {"lr": 5e-3, "warmup": 2}, "evaluation": {"every": 5}, "max_steps": 10,
    }  # fmt: skip
    return lambda backend: run_of(backend, fields=fields)


def test_one_process_learns_grade_school_maths(learned):
    assert losses(learned("single"), "train")[0] > 6
    assert losses(learned("single"), "eval")[-1] < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp_full_shard", "zero3"])
def test_the_evaluation_loss_falls_as_far_as_on_one_process(learned, backend):
    alone, together = (losses(learned(each), "eval") for each in ("single", backend))
    assert len(alone) == len(together) > 0
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < FALL
