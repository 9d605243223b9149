"""Llama-3.1-8B-Instruct, DPO with LoRA, on UltraFeedback's pairs: one data-centre GPU.

The model is gated: accept its licence on the hub and log in (`hf auth login`) first.
A few of the 62,135 pairs have two equal answers: they are dropped and counted.
"""

from finetune import DPO, Data, Model

PAIRS = Data("trl-lib/ultrafeedback_binarized", "preference", on_bad_row="drop")
HELD_OUT = Data(
    "trl-lib/ultrafeedback_binarized", "preference", split="test", first=512, on_bad_row="drop"
)
MODEL = Model("meta-llama/Llama-3.1-8B-Instruct", activation_checkpointing=True)

recipe = (
    DPO(MODEL, beta=0.1, epochs=1)
    .with_data(PAIRS, eval_data=HELD_OUT)
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=1, max_length=2048, overlong="drop")
    .with_optim(lr=1e-5)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("single")
)
