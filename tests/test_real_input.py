"""A real pretrained model learns from real data, by the same amount under every backend."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finetune, write_recipe
from test_backends import BACKENDS, SEVERAL, largest, launch, losses

from finetune.runs.run import Run

FALL = 2e-5
"""Evaluation losses after ten steps of lr 5e-3 in fp32: rounding that AdamW amplifies."""

Learned = Callable[[str], Run]


@pytest.fixture(scope="module")
def learned(assets: Path, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """stories260K after ten LoRA steps on GSM8K, on a backend; trained once each."""
    root = tmp_path_factory.mktemp("gsm8k")
    data = {"format": "question_answer"}
    recipe = write_recipe(
        root / "gsm8k.json",
        {
            "method": "sft",
            "model": {"name": str(assets / "models/stories260K"), "chat_template": "plain"},
            "data": [data | {"source": str(assets / "data/gsm8k/train.jsonl"), "first": 400}],
            "eval_data": [data | {"source": str(assets / "data/gsm8k/test.jsonl"), "first": 24}],
            "adapter": {"r": 8},
            "batch": {"rows": 8, "micro_rows": 4, "max_length": 192, "overlong": "truncate"},
            "optim": {"lr": 5e-3, "warmup": 2},
            "evaluation": {"every": 5},
            "max_steps": 10,
        },
    )

    def run(backend: str) -> Run:
        place = root / backend
        if not place.exists():
            launch(finetune, recipe, backend, place)
        return Run(place)

    return run


def test_one_process_learns_grade_school_maths(learned):
    first, *_ = losses(learned("single"))
    *_, last = losses(learned("single"), "eval")
    assert first > 6
    assert last < 4.5


@pytest.mark.parametrize(
    "backend", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in SEVERAL[1:])]
)
def test_the_evaluation_loss_falls_as_far_as_on_one_process(learned, backend):
    alone, together = learned("single"), learned(backend)
    assert backend in BACKENDS
    assert largest(losses(alone, "eval"), losses(together, "eval")) < FALL
