"""Qwen3-0.6B, all weights, taught by Qwen3-8B on open instructions: one GPU of 80 GB."""

from finetune import Data, Distill, Model, Teacher

recipe = (
    Distill(
        Model("Qwen/Qwen3-0.6B", activation_checkpointing=True),
        teacher=Teacher("Qwen/Qwen3-8B"),
        eval_rows=256,
        epochs=1,
    )
    .with_data(Data("HuggingFaceTB/smol-smoltalk", "messages", first=100_000))
    .with_full_weights()
    .with_batch(rows=64, micro_rows=4, max_length=1024, overlong="drop")
    .with_evaluation(every=500)
    .with_saving(every=500)
    .with_backend("single")
)
