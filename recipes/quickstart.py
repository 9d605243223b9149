"""Quickstart, part 2: QLoRA of the base made by `make quickstart`, free text to JSON."""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("quickstart/base/final"))
    .with_data(
        Data("quickstart/data/train.jsonl", "messages"),
        eval_data=Data("quickstart/data/held_out.jsonl", "messages"),
    )
    .with_qlora(r=16)
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(lr=4e-3, warmup=0.05, min_lr=0.05)
    .with_evaluation(every=94)
    .with_epochs(2)
)
