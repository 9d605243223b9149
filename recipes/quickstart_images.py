"""Quickstart with images: a tiny Qwen2.5-VL of random weights learns the names of colours."""

from finetune import SFT, Data, Model

recipe = (
    SFT(
        Model(
            "quickstart/images/base",
            reads=("image",),
            trains=("language", "connector", "tower"),
        )
    )
    .with_data(
        Data("quickstart/images/train.jsonl", "messages"),
        eval_data=Data("quickstart/images/held_out.jsonl", "messages"),
    )
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(lr=3e-3, warmup=10, min_lr=0.1)
    .with_evaluation(every=25)
    .with_epochs(3)
)
