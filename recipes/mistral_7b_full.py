"""Mistral-7B-Instruct-v0.3, all weights, on UltraChat: a node of data-centre GPUs."""

from finetune import SFT, Data, Model

CHATS = Data("HuggingFaceH4/ultrachat_200k", "messages", split="train_sft")
HELD_OUT = Data("HuggingFaceH4/ultrachat_200k", "messages", split="test_sft", first=512)

recipe = (
    SFT(Model("mistralai/Mistral-7B-Instruct-v0.3", activation_checkpointing=True), epochs=1)
    .with_data(CHATS, eval_data=HELD_OUT)
    .with_full_weights()
    .with_batch(rows=128, micro_rows=1, max_length=2048, overlong="truncate")
    .with_optim(lr=5e-6, warmup=0.1)
    .with_evaluation(every=200)
    .with_saving(every=200)
    .with_backend("fsdp_full_shard")
)
