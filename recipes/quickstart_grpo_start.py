"""Quickstart of rewards, part 1: a few supervised steps, after which a sample is right at times."""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("quickstart/base/final"))
    .with_data(Data("quickstart/data/train.jsonl", "messages"))
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(lr=3e-3, schedule="constant", warmup=0)
    .with_steps(9)
)
