"""Qwen3-0.6B, all weights, on Alpaca's instructions: one consumer GPU of the larger kind."""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("Qwen/Qwen3-0.6B", activation_checkpointing=True), eval_rows=512, epochs=3)
    .with_data(Data("tatsu-lab/alpaca", "alpaca"))
    .with_full_weights()
    .with_batch(rows=128, micro_rows=4, max_length=1024, overlong="drop")
    .with_optim(lr=2e-5)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("single")
)
