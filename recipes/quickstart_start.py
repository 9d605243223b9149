"""Quickstart of DPO and GRPO, part 1: records in two orders of keys, to choose from."""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("quickstart/base/final"))
    .with_data(Data("quickstart/data/mixed.jsonl", "messages"))
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(lr=3e-3, warmup=0.1)
    .with_steps(60)
)
