"""Quickstart of preferences, part 2: DPO towards records with alphabetical keys."""

from finetune import DPO, Data, Model

recipe = (
    DPO(Model("quickstart/start/final"), eval_rows=32)
    .with_data(Data("quickstart/data/pairs.jsonl", "preference"))
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(lr=1e-4, schedule="constant", warmup=0)
    .with_steps(10)
)
