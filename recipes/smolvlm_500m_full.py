"""SmolVLM-500M, all weights with the tower, on pictures of yours: one consumer GPU.

It cuts every image into tiles of 64 tokens, up to 17 of them; `do_image_splitting` leaves one. The
rows are those of `qwen3_vl_4b_lora`.
"""

from finetune import SFT, Data, Model

recipe = (
    SFT(
        Model(
            "HuggingFaceTB/SmolVLM-500M-Instruct",
            reads=("image",),
            trains=("language", "connector", "tower"),
            processor_kwargs={"do_image_splitting": False},
        ),
        eval_rows=64,
        epochs=2,
    )
    .with_data(Data("data/pictures.jsonl", "messages"))
    .with_full_weights()
    .with_batch(rows=32, micro_rows=4, max_length=2048, overlong="drop")
    .with_optim(lr=2e-5, warmup=0.1)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
