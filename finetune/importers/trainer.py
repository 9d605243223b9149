"""Translate the keys that axolotl and LLaMA-Factory share: arguments of transformers' Trainer."""

import json
from pathlib import Path
from typing import Any, cast

from finetune.importers.translation import Translation, shown, text

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit", "adafactor": "adafactor", "muon": "muon",
}  # fmt: skip
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant",
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
}  # fmt: skip
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")

NOT_NEEDED = {
    "output_dir": "give --output to `finetune train` or `finetune launch`",
    "logging_steps": "every step is recorded in metrics.jsonl",
    "logging_dir": "metrics are in the run directory",
    "logging_strategy": "every step is recorded in metrics.jsonl",
    "overwrite_output_dir": "a run directory is never overwritten; name another with --output",
    "group_by_length": "the rows of a step are always divided into micro-batches by length",
    "dataloader_num_workers": "rows are prepared once and read from memory-mapped files",
    "dataloader_pin_memory": "rows are prepared once and read from memory-mapped files",
    "dataloader_prefetch_factor": "rows are prepared once and read from memory-mapped files",
    "remove_unused_columns": "columns that a format does not read are counted by name",
    "ddp_timeout": "give --timeout MINUTES to `finetune train` or `finetune launch`",
    "ddp_find_unused_parameters": "every trained parameter must get a gradient",
    "resume_from_checkpoint": "give --resume to `finetune train` or `finetune launch`",
    "auto_resume_from_checkpoints": "give --resume auto",
    "save_safetensors": "weights are always saved as safetensors",
    "tf32": "fp32 matrix products follow PyTorch's own setting",
    "plot_loss": "loss.png is always drawn; --no-plot turns it off",
    "include_num_input_tokens_seen": "tokens are always recorded",
    "include_tokens_per_second": "tokens per second are always recorded",
    "run_name": "a run is named by its directory",
    "local_rank": "the launcher sets it",
}
"""Keys of both toolkits that do not affect training, and what replaces them."""


def batch(job: Translation, micro: str, default: int) -> None:
    """Translate the rows per step: micro-batch x accumulation x processes."""
    rows = job.get(micro, default)
    steps = job.get("gradient_accumulation_steps", 1)
    job.set("batch.micro_rows", rows)
    job.say(micro, "translated", f"batch.micro_rows={shown(rows)}")
    if isinstance(rows, int) and isinstance(steps, int):
        whole = rows * steps * job.processes
        reason = f"batch.rows={whole} ({rows} x {steps} x {job.processes} processes)"
        job.set("batch.rows", whole)
        job.say("gradient_accumulation_steps", "translated", reason)
        job.assumed.append(
            f"batch.rows={whole}: rows of a step over all processes, assumed to be "
            f"{job.processes}; --processes sets another number"
        )
        return
    job.say(
        "gradient_accumulation_steps",
        "no counterpart",
        f"{shown(steps)} is not a number; set batch.rows, the rows of a step over all processes",
    )


def schedule(job: Translation, scheduler: str, usual: str, warmup: float) -> None:
    """Translate learning rate, schedule, warmup, and the optimizer with its constants."""
    job.move("learning_rate", "optim.lr")
    name = text(job.get(scheduler, usual))
    job.set("optim.schedule", SCHEDULES.get(name, "cosine"))
    if name in SCHEDULES:
        job.say(scheduler, "translated", f"optim.schedule={SCHEDULES[name]}")
    else:
        job.say(scheduler, "no counterpart", f"{name}: replaced by optim.schedule=cosine")
    if scheduler not in job.source:
        job.assumed.append(f"optim.schedule={usual}: the other toolkit's default")
    _warmup(job, warmup)
    _end_of_schedule(job)
    _optimizer(job)
    job.move("weight_decay", "optim.weight_decay")
    job.move("max_grad_norm", "optim.max_grad_norm", lambda norm: norm or None)
    if {"adam_beta1", "adam_beta2"} & job.source.keys():
        betas = [job.get("adam_beta1", 0.9), job.get("adam_beta2", 0.999)]
        job.set("optim.betas", betas)
        for key in ("adam_beta1", "adam_beta2"):
            job.say(key, "translated", f"optim.betas={betas}")
    job.move("adam_epsilon", "optim.eps")


def _warmup(job: Translation, usual: float) -> None:
    steps, share = job.get("warmup_steps"), job.get("warmup_ratio")
    if steps:
        job.move("warmup_steps", "optim.warmup")
        job.say("warmup_ratio", "not needed", "warmup_steps takes precedence")
        return
    job.say("warmup_steps", "translated", "optim.warmup=0")
    if share is None and steps is None and usual:
        job.assumed.append(f"optim.warmup={usual}: the other toolkit's default")
        share = usual
    job.set("optim.warmup", share or 0.0)
    job.say("warmup_ratio", "translated", f"optim.warmup={shown(share)}")


def _end_of_schedule(job: Translation) -> None:
    key = "lr_scheduler_kwargs"
    kwargs = job.get(key)
    if kwargs is None:
        return
    if isinstance(kwargs, dict) and set(cast(dict[str, Any], kwargs)) == {"min_lr_rate"}:
        share = cast(dict[str, Any], kwargs)["min_lr_rate"]
        job.set("optim.min_lr", share)
        job.say(key, "translated", f"optim.min_lr={shown(share)}")
    elif not kwargs:
        job.say(key, "not needed", "it is empty")
    else:
        job.say(
            key, "no counterpart", f"{shown(kwargs)}: only min_lr_rate is translated (optim.min_lr)"
        )


def _optimizer(job: Translation) -> None:
    key = "optimizer" if "optimizer" in job.source else "optim"
    name = text(job.get(key, "adamw_torch"))
    if name in OPTIMIZERS:
        job.set("optim.name", OPTIMIZERS[name])
        job.say(key, "translated", f"optim.name={OPTIMIZERS[name]}")
    elif name == "paged_adamw_32bit":
        job.say(
            key,
            "differs",
            "paged_adamw_32bit: replaced by optim.name=adamw, whose state is not paged",
        )
    else:
        job.say(key, "no counterpart", f"{name}: replaced by optim.name=adamw")


def length(job: Translation, epochs: str, usual: float) -> None:
    """Translate epochs or steps, and the seed."""
    job.set("epochs", job.get(epochs, usual))
    job.move(epochs, "epochs")
    if epochs not in job.source and not _steps(job):
        job.assumed.append(f"epochs={usual:g}: the other toolkit's default")
    if _steps(job):
        job.move("max_steps", "max_steps")
    else:
        job.say("max_steps", "not needed", "below 1: the number of epochs applies")
    job.set("seed", job.get("seed", 42))
    job.move("seed", "seed")
    if "seed" not in job.source:
        job.assumed.append("seed=42: the other toolkit's default")
    job.say("data_seed", "not needed", "seed also sets the order of rows")
    if "data_seed" in job.source and job.source["data_seed"] != job.get("seed", 42):
        job.say("data_seed", "differs", "seed also sets the order of rows")


def _steps(job: Translation) -> bool:
    steps = job.get("max_steps")
    return steps is not None and not (isinstance(steps, int) and steps < 1)


def evaluation_and_saving(job: Translation) -> None:
    for key, path in (("eval_steps", "evaluation.every"), ("save_steps", "saving.every")):
        value = job.get(key)
        if isinstance(value, float) and value < 1:
            reason = f"a fraction of the run: set {path} to a number of steps"
            job.say(key, "no counterpart", reason)
        elif value == 0:
            job.say(key, "translated", f"{path}=null, once at the end")
        else:
            job.move(key, path)
    for key, path in (
        ("eval_strategy", "evaluation.every"),
        ("evaluation_strategy", "evaluation.every"),
        ("save_strategy", "saving.every"),
    ):
        word = text(job.get(key))
        if word == "steps":
            job.say(key, "translated", f"{path} counts steps")
        elif word == "epoch":
            job.say(
                key, "differs", f"once, at the end; set {path} to the number of steps of an epoch"
            )
        elif word in ("no", "false", "none"):
            job.say(key, "differs", "once, at the end of the run")
        else:
            job.say(key, "no counterpart", f"{word}: once, at the end; or set {path}")
    job.move("save_total_limit", "saving.keep")
    job.refuse_flag("save_only_model", "a checkpoint always holds what resuming needs")
    job.say("load_best_model_at_end", "not needed", "an export uses the best checkpoint")
    job.say("metric_for_best_model", "not needed", "the evaluation loss is used")
    if text(job.get("metric_for_best_model", "loss")) not in ("loss", "eval_loss"):
        job.say("metric_for_best_model", "differs", "the evaluation loss is used instead")
    job.refuse_flag("greater_is_better", "the evaluation loss is used: lower is better")


def precision(job: Translation) -> None:
    for key in ("bf16", "bfloat16", "pure_bf16"):
        if key in job.source:
            on = job.source[key] in (True, "auto", "full")
            reason = "backends train in bf16 by default" if on else "give --precision fp32 for fp32"
            job.say(key, "translated" if on else "not needed", reason)
    for key in ("fp16", "float16"):
        if job.get(key):
            job.say(key, "differs", "bf16 instead, which needs no loss scaling")
        else:
            job.say(key, "not needed", "backends train in bf16 by default")


def checkpointing(job: Translation) -> None:
    value = job.get("gradient_checkpointing")
    if value in (True, False, "offload"):
        job.move("gradient_checkpointing", "model.activation_checkpointing")
    elif value is not None:
        job.set("model.activation_checkpointing", True)
        reason = f"{shown(value)}: replaced by model.activation_checkpointing=true"
        job.say("gradient_checkpointing", "differs", reason)
    job.say("gradient_checkpointing_kwargs", "not needed", "recomputation gives equal gradients")


def trackers(job: Translation) -> None:
    names = job.get("report_to")
    if names is None:
        return
    words = cast(list[object], names) if isinstance(names, list) else [names]
    wanted = [text(word) for word in words if text(word) not in ("none", "false")]
    known = [word for word in wanted if word in TRACKERS]
    job.set("trackers", known)
    others = [word for word in wanted if word not in TRACKERS]
    if others:
        reason = f"{', '.join(others)}: supported trackers are {', '.join(TRACKERS)}"
        job.say("report_to", "no counterpart", reason)
    else:
        job.say("report_to", "translated", f"trackers={known}")


def backend(job: Translation, folder: Path) -> None:
    """Choose a backend from a DeepSpeed file, FSDP's keys, or the number of processes."""
    name = "single" if job.processes == 1 else "ddp"
    if job.get("deepspeed"):
        name = _deepspeed(job, folder) or name
    else:
        job.say("deepspeed", "not needed", "it is empty")
    if job.get("fsdp") or job.get("fsdp_config"):
        name = _fsdp(job)
    for key in ("fsdp", "fsdp_config", "fsdp_version"):
        if key not in job.outcomes:
            job.say(key, "not needed", "FSDP2 wraps the layers of the model automatically")
    job.set("backend", name)


def _deepspeed(job: Translation, folder: Path) -> str | None:
    given = job.source["deepspeed"]
    config: Any = given
    if not isinstance(given, dict):
        for path in (folder / str(given), Path(str(given))):
            if path.is_file():
                try:
                    config = json.loads(path.read_text(encoding="utf-8"))
                except (OSError, ValueError, RecursionError) as error:
                    job.say("deepspeed", "no counterpart", f"{path}: cannot be read: {error}")
                    return None
                break
    if isinstance(config, dict):
        zero = cast(dict[str, Any], config).get("zero_optimization")
        values = cast(dict[str, Any], zero) if isinstance(zero, dict) else {}
        stage = str(values.get("stage"))
        sections = [values.get(key) for key in ("offload_param", "offload_optimizer")]
        devices = [
            cast(dict[str, Any], each).get("device") for each in sections if isinstance(each, dict)
        ]
        offload = "_nvme" if "nvme" in devices else "_offload" if "cpu" in devices else ""
        known = f"its stage is {stage}"
    else:
        word = str(given).lower()
        stage = next(
            (digit for digit in "123" if f"z{digit}" in word or f"zero{digit}" in word), ""
        )
        offload = "_offload" if "offload" in word or "cpu" in word else ""
        known = "from its name, as the file was not found"
    name = f"zero{stage}{offload}"
    shipped = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
    if name not in shipped:
        reason = f"{shown(given)}: no such backend; known are {', '.join(shipped)}"
        job.say("deepspeed", "no counterpart", reason)
        return None
    job.say("deepspeed", "translated", f"backend={name} ({known}); its other values are not used")
    return name


def _fsdp(job: Translation) -> str:
    given = job.get("fsdp_config")
    config = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    config = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    wanted: Any = job.get("fsdp") or []
    words = set(cast(list[str], wanted) if isinstance(wanted, list) else str(wanted).split())
    strategy = str(config.get("sharding_strategy", "")).lower()
    keep = "shard_grad_op" in words or strategy in ("shard_grad_op", "2")
    keep = keep or config.get("reshard_after_forward") in (False, "false")
    offload = "offload" in words or config.get("offload_params") in (True, "true")
    name = f"fsdp_{'shard_grad_op' if keep else 'full_shard'}{'_offload' if offload else ''}"
    hybrid = any("hybrid" in str(word).lower() for word in (*words, strategy))
    reason = f"backend={name}" + (", which shards over all processes" if hybrid else "")
    for key in ("fsdp", "fsdp_config"):
        job.say(
            key, "differs" if hybrid else "translated", f"{reason}; its other values are not used"
        )
    return name


def the_rest(job: Translation) -> None:
    """Record the keys that do not affect training."""
    for key, reason in NOT_NEEDED.items():
        if key not in job.outcomes:
            job.say(key, "not needed", reason)
    for key in job.source:
        if key.startswith("wandb_") or key.startswith("mlflow_") or key.startswith("comet_"):
            reason = "set the tracker's own environment variables"
            if key not in job.outcomes:
                job.say(key, "not needed", reason)
        if key.startswith(("push_to_hub", "hub_")) and key not in job.outcomes:
            job.say(key, "not needed", "nothing is uploaded; `finetune export` writes the model")
