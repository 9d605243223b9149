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
LOSSES, LEVEL = ("grpo", "dapo", "dr_grpo", "cispo", "gspo"), "importance_sampling_level"
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
TOLD = {
    "mask_truncated_completions": "overlong_filter",
    "max_resample_times": "dynamic_sample max_resample_times",
}


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
    job.put("batch.max_length", length + job.get("max_prompt_length", 1024), "max_prompt_length")
    job.set("batch.overlong", "drop")
    job.assumed.append("batch.max_length: of a prompt and its completion; longer prompts are left")
    accumulated = max(1, job.get("gradient_accumulation_steps", 1))
    times = job.get("steps_per_generation", accumulated) / accumulated
    if "generation_batch_size" in job.source:
        times = job.source["generation_batch_size"] / job.fields["batch"]["rows"]
    # Several samplings of one optimizer step are by the same policy, as one is.
    job.set("steps_per_generation", max(1, int(times) if times == int(times) else times))
    told = f"steps_per_generation={times:g}, in optimizer steps"
    job.say("generation_batch_size steps_per_generation", "translated", told)
    if method == "grpo":
        _loss(job, usual)
    if job.get("overlong_filter"):
        job.set("mask_truncated_completions", True)
    if job.get("dynamic_sample"):
        job.set("max_resample_times", job.get("max_resample_times", 3))
    job.say_all("translated", TOLD)
    _rewards(job)


def _loss(job: Translation, usual: Mapping[str, Any]) -> None:
    """Translate the loss with its range: both sides are those of `epsilon`, unless it says so."""
    loss, level = text(job.get("loss_type", usual["loss_type"])), job.get(LEVEL, "token")
    if (loss, level) == ("grpo", "sequence"):
        loss = level = "gspo"
    if loss in LOSSES:
        job.put("loss_type", loss, "loss_type")
    if level in ("token", "gspo"):
        job.say(LEVEL, "translated", f"loss_type={loss}")
    job.put("epsilon_high", job.get("epsilon_high", job.fields["epsilon"]), "epsilon_high")
    scale = text(job.get("scale_rewards", "group"))
    if SCALES.get(scale, scale) in ("group", "batch", "none"):
        job.move("scale_rewards", "scale_rewards", lambda _: SCALES.get(scale, scale))


def _rewards(job: Translation) -> None:
    given = [text(name) for name in listed(job.get("reward_funcs", []))]
    weights = listed(job.get("reward_weights", [1.0] * len(given)))
    rewards, lost = list[dict[str, Any]](), list[str]()
    for name, weight in zip(given, weights, strict=False):
        module, _, function = name.rpartition(".")
        found = REWARDS.get(name, {"function": f"{module}:{function}"} if module else None)
        if found is None:
            lost.append(name)
        else:
            rewards.append(found | {"weight": weight})
    for key in ("reward_model", "reward_model_name_or_path"):
        rewards += [{"function": text(model)} for model in listed(job.get(key, []))]
    job.set("reward_funcs", rewards)
    told = shown([reward["function"] for reward in rewards])
    keys = "reward_weights reward_model reward_model_name_or_path reward_funcs"
    job.say(keys, "translated", told)
    if lost:
        reason = f"{', '.join(lost)}: name a function of yours as module:function in reward_funcs"
        job.say("reward_funcs", "no counterpart", reason)
    elif "accuracy" in given:
        job.say("reward_funcs", "differs", f"{told}: of TRL, which also uses math-verify")
