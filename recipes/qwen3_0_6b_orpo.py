"""Qwen3-0.6B, ORPO on all weights, on UltraFeedback's pairs of answers: one consumer GPU.

It starts from the base model: the chosen answers are learned as in supervised fine-tuning.
A few of the 62,135 pairs have two equal answers: they are dropped and counted.
"""

from finetune import ORPO, Data, Model

PAIRS = Data("trl-lib/ultrafeedback_binarized", "preference", on_bad_row="drop")
HELD_OUT = Data(
    "trl-lib/ultrafeedback_binarized", "preference", split="test", first=512, on_bad_row="drop"
)

recipe = (
    ORPO(Model("Qwen/Qwen3-0.6B-Base"), beta=0.1, epochs=1)
    .with_data(PAIRS, eval_data=HELD_OUT)
    .with_batch(rows=64, micro_rows=2, max_length=1024, overlong="drop")
    .with_optim(lr=8e-6)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("single")
)
