"""SmolLM2-135M, all weights, from the base model to a chat model: one consumer GPU.

Data, learning rate and epochs follow the published recipe of the small SmolLM2 chat models
(huggingface/alignment-handbook, recipes/smollm2/sft/config_smol.yaml), with shorter rows.
"""

from finetune import SFT, Data, Model

CHATS = Data("HuggingFaceTB/smol-smoltalk", "messages")
HELD_OUT = Data("HuggingFaceTB/smol-smoltalk", "messages", split="test", first=512)

recipe = (
    SFT(Model("HuggingFaceTB/SmolLM2-135M", chat_template="chatml"), epochs=2)
    .with_data(CHATS, eval_data=HELD_OUT)
    .with_full_weights()
    .with_batch(rows=128, micro_rows=4, max_length=2048, overlong="truncate")
    .with_optim(lr=1e-3, warmup=0.1)
    .with_evaluation(every=500)
    .with_saving(every=500)
    .with_backend("single")
)
