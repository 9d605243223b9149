"""Qwen3-0.6B, KTO with LoRA, on answers labelled as wanted or not: one consumer GPU.

The 13,500 training answers are half wanted, half unwanted.
"""

from finetune import KTO, Data, Model

ANSWERS = Data("trl-lib/kto-mix-14k", "kto")
HELD_OUT = Data("trl-lib/kto-mix-14k", "kto", split="test", first=512)

recipe = (
    KTO(Model("Qwen/Qwen3-0.6B"), beta=0.1, epochs=1)
    .with_data(ANSWERS, eval_data=HELD_OUT)
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=4, max_length=1024, overlong="drop")
    .with_optim(lr=1e-5)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
