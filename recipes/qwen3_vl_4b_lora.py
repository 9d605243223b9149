"""Qwen3-VL-4B, LoRA on the language model, on pictures of yours: one data-centre GPU.

A line of `data/pictures.jsonl` is one conversation; paths of images are relative to that file:
    {"messages": [{"role": "user", "content": [{"type": "image", "path": "images/7.png"},
     {"type": "text", "text": "What is the total?"}]}, {"role": "assistant", "content": "42.10"}]}
"""

from finetune import SFT, Data, Model

recipe = (
    SFT(
        Model("Qwen/Qwen3-VL-4B-Instruct", reads=("image",), activation_checkpointing=True),
        eval_rows=64,
        epochs=2,
    )
    .with_data(Data("data/pictures.jsonl", "messages"))
    .with_lora(r=16)
    .with_batch(rows=32, micro_rows=1, max_length=4096, overlong="drop")
    .with_optim(lr=1e-4, warmup=0.1)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
