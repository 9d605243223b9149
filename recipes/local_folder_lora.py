"""SmolLM2-135M-Instruct from a local folder, LoRA, on a JSONL file of yours: no hub involved.

Any folder that transformers can load will do, for instance what this leaves behind:
    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M
A line of `data/train.jsonl` is one conversation:
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
Both paths count from where the command is typed. Change them here, or for one run:
    finetune train local_folder_lora model.name=/models/Qwen3-0.6B data.0.source=my.jsonl
"""

from finetune import SFT, Data, Model

recipe = (
    SFT(Model("models/SmolLM2-135M"), eval_rows=64, epochs=3)
    .with_data(Data("data/train.jsonl", "messages"))
    .with_lora(r=16)
    .with_batch(rows=16, micro_rows=4, max_length=1024, overlong="truncate")
    .with_optim(lr=2e-4)
    .with_backend("single")
)
