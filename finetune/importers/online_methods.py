"""Translate GRPO and RLOO of other toolkits, whose names of fields are TRL's."""

from collections.abc import Mapping
from typing import Any

from finetune.importers.translation import Translation, listed, shown, text

SAME = (
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "num_iterations", "beta", "epsilon", "mask_truncated_completions",
    "use_bias_correction_kl", "vllm_importance_sampling_clip_max",
)  # fmt: skip
"""Fields with the same name and meaning."""
LOSSES = ("grpo", "dapo", "dr_grpo", "cispo")
SCALES = {"true": "group", "false": "none"}
THOUGHT = r"<think>(?!.*<think>)(.*?)</think>.*"
ANSWERED = r"<think>.*?</think>\s*<answer>.*?</answer>"
REWARDS: dict[str, Any] = {
    "think_format_reward": {"function": "regex", "arguments": {"pattern": THOUGHT}},
    "format": {"function": "regex", "arguments": {"pattern": ANSWERED}},
    "accuracy_reward": {"function": "trl.rewards:accuracy_reward"},
    "accuracy": {"function": "trl.rewards:accuracy_reward"},
    "reasoning_accuracy_reward": {"function": "trl.rewards:reasoning_accuracy_reward"},
}
"""Rewards by their names in TRL and ms-swift; those of math need TRL and math-verify."""
NOT_NEEDED = {
    "answers are sampled by the model that is trained; vllm_server_base_url names a `vllm serve`":
        "use_vllm move_model_batches sleep_level offload_model offload_optimizer gc_collect_after"
        "_offload ds3_gather_for_generation",
    "completions.jsonl has samples":
        "log_completions num_completions_to_print log_unique_prompts log_entropy",
    "rows are always shuffled": "shuffle_dataset",
}  # fmt: skip


def translate(job: Translation, method: str, usual: Mapping[str, Any]) -> None:
    """Set the fields of an online method; `usual` are the other toolkit's defaults.

    Call it after the rows per step are known.
    """
    for field in SAME:
        if field in usual:
            job.move_or_assume(field, field, usual[field])
        elif method == "grpo" or field != "use_bias_correction_kl":
            job.move(field, field)
    length = job.get("max_completion_length", usual["max_completion_length"])
    if isinstance(length, int):
        job.set("batch.max_length", length + job.get("max_prompt_length", 1024))
        job.say("max_prompt_length", "translated", "batch.max_length, with the completion")
    job.set("batch.overlong", "drop")
    job.assumed.append("batch.max_length: of a prompt and its completion; longer prompts are left")
    sampled = job.get("generation_batch_size"), job.get("steps_per_generation")
    step, accumulated = job.fields["batch"]["rows"], job.get("gradient_accumulation_steps", 1)
    times = sampled[0] / step if sampled[0] else (sampled[1] or accumulated) / accumulated
    # Several samplings of one optimizer step are by the same policy, as one is.
    times = max(1, int(times) if times == int(times) else times)
    job.set("steps_per_generation", times)
    for key in ("generation_batch_size", "steps_per_generation"):
        job.say(key, "translated", f"steps_per_generation={times:g}, in optimizer steps")
    if method == "grpo":
        _loss(job, usual)
    if job.get("overlong_filter"):
        job.set("mask_truncated_completions", True)
    job.say("overlong_filter", "translated", "mask_truncated_completions")
    if job.get("dynamic_sample"):
        job.set("max_resample_times", job.get("max_resample_times", 3))
    for key in ("dynamic_sample", "max_resample_times"):
        job.say(key, "translated", "max_resample_times")
    _rewards(job)
    job.say_all("not needed", NOT_NEEDED)
    reason = next(iter(NOT_NEEDED))
    for key in [key for key in job.source if key.startswith("vllm_") and key not in job.outcomes]:
        job.say(key, "not needed", reason)


def _loss(job: Translation, usual: Mapping[str, Any]) -> None:
    """Translate the loss with its range: both sides are those of `epsilon`, unless it says so."""
    loss = text(job.get("loss_type", usual["loss_type"]))
    whole = job.get("importance_sampling_level") == "sequence" and loss == "grpo"
    job.set("loss_type", "gspo" if whole else loss if loss in LOSSES else "dapo")
    known = loss in LOSSES
    reason = f"loss_type={job.fields['loss_type']}" if known else f"{loss}: replaced by dapo"
    job.say("loss_type", "translated" if known else "no counterpart", reason)
    if whole or job.get("importance_sampling_level") == "token":
        job.say("importance_sampling_level", "translated", reason)
    job.set("epsilon_high", job.get("epsilon_high", job.fields["epsilon"]))
    job.say("epsilon_high", "translated", f"epsilon_high={job.fields['epsilon_high']}")
    scale = text(job.get("scale_rewards", "group"))
    if SCALES.get(scale, scale) in ("group", "batch", "none"):
        job.set("scale_rewards", SCALES.get(scale, scale))
        job.say("scale_rewards", "translated", f"scale_rewards={SCALES.get(scale, scale)}")


def _rewards(job: Translation) -> None:
    given = [text(name) for name in listed(job.get("reward_funcs", [])) if name]
    weights = listed(job.get("reward_weights", [1.0] * len(given)))
    lost, rewards = list[str](), list[dict[str, Any]]()
    for name, weight in zip(given, weights, strict=False):
        module, _, function = name.rpartition(".")
        own = {"function": f"{module}:{function}"} if module else None
        reward = REWARDS.get(name, own)
        lost += [] if reward else [name]
        rewards += [reward | {"weight": weight}] if reward else []
    models = [text(each) for each in listed(job.get("reward_model", [])) if each]
    models += [text(each) for each in listed(job.get("reward_model_name_or_path", []))]
    rewards += [{"function": model} for model in models]
    job.set("reward_funcs", rewards)
    reason = f"{', '.join(lost)}: name a function of yours as module:function in reward_funcs"
    shown_rewards = shown([reward["function"] for reward in rewards])
    for key in ("reward_funcs", "reward_weights", "reward_model", "reward_model_name_or_path"):
        kept = not lost or key != "reward_funcs"
        job.say(key, "translated" if kept else "no counterpart", shown_rewards if kept else reason)
    if "accuracy" in given and not lost:
        job.say("reward_funcs", "differs", f"{shown_rewards}: of TRL, which also uses math-verify")
