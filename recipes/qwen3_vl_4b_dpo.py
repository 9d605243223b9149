"""Qwen3-VL-4B, DPO with LoRA, on pairs of answers about pictures of yours: one data-centre GPU.

A line of `data/pairs.jsonl` has a prompt and two answers:
    {"prompt": [{"role": "user", "content": [{"type": "image", "path": "images/7.png"},
     {"type": "text", "text": "What is the total?"}]}],
     "chosen": [{"role": "assistant", "content": "42.10"}],
     "rejected": [{"role": "assistant", "content": "I cannot read that."}]}
"""

from finetune import DPO, Data, Model

recipe = (
    DPO(
        Model("Qwen/Qwen3-VL-4B-Instruct", reads=("image",), activation_checkpointing=True),
        beta=0.1,
        eval_rows=64,
        epochs=1,
    )
    .with_data(Data("data/pairs.jsonl", "preference"))
    .with_lora(r=16)
    .with_batch(rows=32, micro_rows=1, max_length=4096, overlong="drop")
    .with_optim(lr=5e-6, warmup=0.1)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
