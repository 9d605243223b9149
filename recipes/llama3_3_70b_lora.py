"""Llama-3.3-70B-Instruct, LoRA, on UltraChat: a node of data-centre GPUs.

The model is gated: accept its licence on the hub and log in (`hf auth login`) first.
"""

from finetune import SFT, Data, Model

CHATS = Data("HuggingFaceH4/ultrachat_200k", "messages", split="train_sft")
HELD_OUT = Data("HuggingFaceH4/ultrachat_200k", "messages", split="test_sft", first=512)

recipe = (
    SFT(Model("meta-llama/Llama-3.3-70B-Instruct", activation_checkpointing=True), epochs=1)
    .with_data(CHATS, eval_data=HELD_OUT)
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=1, max_length=2048, overlong="truncate")
    .with_optim(lr=1e-4, warmup=0.1, max_grad_norm=0.3)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("fsdp_full_shard")
)
