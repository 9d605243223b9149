"""What the options do to learning: nothing, on a real model and real questions."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, write_recipe

from finetune.runs.run import Run

PLAIN = {
    "head": "whole", "lora": "separate", "norm": "plain", "activation": "plain", "rotary": "plain",
}  # fmt: skip
ROWS, HELD_OUT = 480, 64
SUMMED_OTHERWISE = 1e-6
"""What sums of fp32 in another order move the evaluation loss by; 3e-8 was measured."""
ROUNDED = 5e-3
"""What steps in bf16 move it by: 1.4e-3 without the options, 4e-4 with them."""
SEEDS = 0.05
"""What another order of rows may move it by."""


def trained(
    folder: Path,
    finetune: Finetune,
    assets: Path,
    kernels: dict[str, str],
    precision: str = "fp32",
    **batch: Any,
) -> tuple[float, int, int]:
    """Evaluation loss after an epoch of GSM8K, its steps, and its tokens."""
    questions = assets / "data" / "gsm8k"
    recipe = {
        "method": "sft",
        "model": {"name": str(assets / "models" / "stories260K"), "chat_template": "plain"},
        "data": [
            {"source": str(questions / "train.jsonl"), "format": "question_answer", "first": ROWS}
        ],
        "eval_data": [
            {"source": str(questions / "test.jsonl"), "format": "question_answer",
             "first": HELD_OUT}
        ],
        "batch": {"max_length": 512, "overlong": "drop", **batch},
        "optim": {"lr": 2e-3, "warmup": 3},
        "kernels": kernels,
        "epochs": 1,
    }  # fmt: skip
    run = Run(folder / "run")
    path = write_recipe(folder / "recipe.json", recipe)
    done = finetune("train", str(path), "--precision", precision, "--output", str(run.root))
    assert done.status == 0, done.output
    data = json.loads((run.root / "data.json").read_text())
    (evaluated,) = run.read_metrics("eval")
    return evaluated["loss"], evaluated["step"], data["train"]["tokens"]


@pytest.mark.slow
def test_a_real_model_learns_the_same_with_and_without_the_options(tmp_path, finetune, assets):
    folders = [tmp_path / name for name in ("plain", "options", "rounded", "packed")]
    for folder in folders:
        folder.mkdir()
    padded = {"rows": 16, "micro_rows": 4}
    plain, *amount = trained(folders[0], finetune, assets, PLAIN, **padded)
    options, *same = trained(folders[1], finetune, assets, {}, **padded)
    rounded, *again = trained(folders[2], finetune, assets, {}, "bf16", **padded)
    # 395 rows lie in 321 packs: either way they are 25 steps.
    packed, *as_many = trained(
        folders[3], finetune, assets, {}, rows=13, micro_rows=1, packing=True
    )
    assert amount == same == again == as_many == [25, 134_565]
    assert plain < 3.2  # 5.0 before, so that there is something to compare
    assert abs(options - plain) < SUMMED_OTHERWISE
    assert 0 < abs(rounded - plain) < ROUNDED
    assert abs(packed - plain) < SEEDS
