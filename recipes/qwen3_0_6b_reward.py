"""Qwen3-0.6B, a reward model with LoRA, on UltraFeedback's pairs of answers: one consumer GPU.

A few of the 62,135 pairs have two equal answers: they are dropped and counted.
"""

from finetune import Data, Model, RewardModel

PAIRS = Data("trl-lib/ultrafeedback_binarized", "preference", on_bad_row="drop")
HELD_OUT = Data(
    "trl-lib/ultrafeedback_binarized", "preference", split="test", first=512, on_bad_row="drop"
)

recipe = (
    RewardModel(Model("Qwen/Qwen3-0.6B"), center_rewards_coefficient=0.01, epochs=1)
    .with_data(PAIRS, eval_data=HELD_OUT)
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=2, max_length=1024, overlong="drop")
    .with_optim(lr=1e-4)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("single")
)
