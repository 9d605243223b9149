"""Quickstart of rewards: GRPO towards the exact record with alphabetical keys."""

from finetune import GRPO, Data, Model, Reward

recipe = (
    GRPO(
        Model("quickstart/start/final"),
        reward_funcs=(Reward("exact_match"),),
        eval_reward_funcs=(Reward("exact_match"),),
        num_generations=8,
        max_completion_length=48,
        sampling_rows=128,
    )
    .with_data(
        Data("quickstart/data/wanted.jsonl", "prompts"),
        eval_data=Data("quickstart/data/wanted_held_out.jsonl", "prompts"),
    )
    .with_batch(rows=128, micro_rows=32, max_length=128)
    .with_optim(lr=1e-3)
    .with_evaluation(every=5)
    .with_steps(10)
)
