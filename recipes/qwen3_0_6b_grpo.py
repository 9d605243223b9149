"""Qwen3-0.6B, GRPO with LoRA, on the questions of GSM8K: one consumer GPU.

A completion is right where its last number is that of the answer.
"""

from finetune import GRPO, Data, Model, Reward

LAST_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"

recipe = (
    GRPO(
        Model("Qwen/Qwen3-0.6B", chat_template_kwargs={"enable_thinking": False}),
        reward_funcs=(Reward("exact_match", arguments={"pattern": LAST_NUMBER}),),
        num_generations=8,
        max_completion_length=512,
    )
    .with_data(
        Data("openai/gsm8k", "prompts", subset="main"),
        eval_data=Data("openai/gsm8k", "prompts", subset="main", split="test", first=256),
    )
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=4, max_length=1024, overlong="drop")
    .with_optim(lr=1e-5)
    .with_evaluation(every=50)
    .with_saving(every=50)
    .with_steps(500)
    .with_backend("single")
)
