"""Qwen2.5-VL-7B, QLoRA on the language model, on pictures of yours: one consumer GPU.

Images are scaled down to at most 1,280 tokens (28 x 28 pixels each); the tower stays in bf16. The
rows are those of `qwen3_vl_4b_lora`.
"""

from finetune import SFT, Data, Model

recipe = (
    SFT(
        Model(
            "Qwen/Qwen2.5-VL-7B-Instruct",
            reads=("image",),
            processor_kwargs={
                "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 1280 * 28 * 28}
            },
            activation_checkpointing=True,
        ),
        eval_rows=64,
        epochs=2,
    )
    .with_data(Data("data/pictures.jsonl", "messages"))
    .with_qlora(r=16)
    .with_batch(rows=32, micro_rows=1, max_length=2048, overlong="drop")
    .with_optim(lr=1e-4, warmup=0.1)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
