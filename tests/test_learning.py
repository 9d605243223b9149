"""What the options do to learning: nothing, on a real model and real questions."""

from typing import Any

import pytest
from conftest import read

PLAIN = {
    "head": "whole", "lora": "separate", "norm": "plain", "activation": "plain", "rotary": "plain",
}  # fmt: skip
ROWS, HELD_OUT = 240, 64
SUMMED_OTHERWISE = 1e-6
"""What sums of fp32 in another order move the evaluation loss by; 3e-8 was measured."""
ROUNDED = 5e-3
"""What steps in bf16 move it by: 1.4e-3 without the options, 4e-4 with them."""
SEEDS = 0.05
"""What another order of rows may move it by."""


@pytest.mark.slow
def test_a_real_model_learns_the_same_with_and_without_the_options(run_of, assets):
    """Evaluation loss after an epoch of GSM8K, its steps, and its tokens."""

    def trained(
        kernels: dict[str, str], precision: str = "fp32", **batch: Any
    ) -> tuple[float, int, int]:
        files = (("data", "train", ROWS), ("eval_data", "test", HELD_OUT))
        recipe = {
            name: [
                {"source": str(assets / "data" / "gsm8k" / f"{part}.jsonl"), "first": count,
                 "format": "question_answer"}
            ]
            for name, part, count in files
        } | {
            "method": "sft",
            "model": {"name": str(assets / "models" / "stories260K"), "chat_template": "plain"},
            "batch": {"max_length": 512, "overlong": "drop", **batch},
            "optim": {"lr": 2e-3, "warmup": 3},
            "kernels": kernels,
            "epochs": 1,
        }  # fmt: skip
        run = run_of("single", "--precision", precision, fields=recipe)
        (evaluated,) = run.read_metrics("eval")
        tokens = read(run.data)["train"]["tokens"]
        return evaluated["loss"], evaluated["step"], tokens

    padded = {"rows": 16, "micro_rows": 4}
    plain, *amount = trained(PLAIN, **padded)
    options, *same = trained({}, **padded)
    rounded, *again = trained({}, "bf16", **padded)
    # Either way they are 13 steps.
    packed, *as_many = trained({}, rows=13, micro_rows=1, packing=True)
    assert amount == same == again == as_many == [13, 68_028]
    assert plain < 3.5  # 5.0 before, so that there is something to compare
    assert abs(options - plain) < SUMMED_OTHERWISE
    assert 0 < abs(rounded - plain) < ROUNDED
    assert abs(packed - plain) < SEEDS
