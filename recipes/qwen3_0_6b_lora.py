"""Qwen3-0.6B, LoRA, on Alpaca's instructions: one consumer GPU."""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("Qwen/Qwen3-0.6B"), eval_rows=512, epochs=1)
    .with_data(Data("tatsu-lab/alpaca", "alpaca"))
    .with_lora(r=16)
    .with_batch(rows=32, micro_rows=4, max_length=1024, overlong="drop")
    .with_optim(lr=2e-4)
    .with_evaluation(every=250)
    .with_saving(every=250)
    .with_backend("single")
)
