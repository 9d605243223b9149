"""Translate the keys that axolotl and LLaMA-Factory share: arguments of transformers' Trainer."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from finetune.data.read.first_rows import fit
from finetune.data.read.sources import find_source
from finetune.data.samples import READ_AS
from finetune.importers.not_needed import reason_of
from finetune.importers.translation import Outcome, Translation, listed, mapping, shown, text
from finetune.methods import find_method
from finetune.recipe import Data
from finetune.recipe.field_types import TRACKERS

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit", "adafactor": "adafactor", "muon": "muon",
    "adamw_torch_8bit": "adamw_8bit", "ao_adamw_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_4bit", "ao_adamw_4bit": "adamw_4bit",
    "sgd": "sgd", "lion_32bit": "lion", "rmsprop": "torch.optim:RMSprop",
    "adagrad": "torch.optim:Adagrad", "schedule_free_adamw": "schedule_free_adamw",
}  # fmt: skip
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant",
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine_with_min_lr",
    "cosine_with_restarts": "cosine_with_restarts", "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt", "reduce_lr_on_plateau": "reduce_lr_on_plateau",
    "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip
OWN_TRACKERS = {
    "swanlab": "accelerate.tracking:SwanLabTracker",
    "comet_ml": "accelerate.tracking:CometMLTracker",
    "clearml": "accelerate.tracking:ClearMLTracker",
    "dvclive": "accelerate.tracking:DVCLiveTracker",
}


def formats(job: Translation) -> None:
    """Find the formats of data on this machine by its rows, for a toolkit that finds them too."""
    kinds = READ_AS[find_method(job.fields["method"]).takes]
    for source in (*job.fields.get("data", []), *job.fields.get("eval_data", [])):
        place = Path(source["source"])
        if not place.exists():
            job.assumed.append(
                f"format={source['format']} of {place}: the other toolkit finds it by the columns, "
                "as does `finetune inspect DATA --model NAME`"
            )
            continue
        if place.is_file():
            source.pop("split", None)
        found = fit(find_source(Data(**source)).rows(), kinds)
        source["format"] = found.format
        if found.columns:
            source["columns"] = found.columns


IN_BF16 = "backends train in bf16 by default"
ATTENTION = ("flash_attention_2", "flex_attention", "sdpa", "eager")


def attention(job: Translation, key: str) -> None:
    """Translate the name of an attention implementation."""
    name = text(job.get(key)).replace("flash_attn", "flash_attention_2")
    if name in ATTENTION:
        job.put("model.attention", name, key)
    else:
        flash = "flash" in name
        job.set("model.attention", "flash_attention_2" if flash else "sdpa")
        job.say(key, "differs", f"{name}: another kernel of the same attention is used")


def dtype(job: Translation) -> None:
    """Translate the data type of the weights, which is a backend's."""
    for key in ("dtype", "torch_dtype"):
        usual = text(job.get(key)) in ("auto", "bfloat16", "bf16")
        job.say(key, "translated" if usual else "differs", f"{IN_BF16}; others: --precision")


def arguments(job: Translation, micro: int = 8, scheduler: str = "linear") -> None:
    """Translate the arguments of a Trainer; the values are another toolkit's defaults."""
    job.move("neftune_noise_alpha", "model.neftune_alpha")
    if job.fields.get("method", "sft") in ("sft", "pretrain"):
        job.move("label_smoothing_factor", "label_smoothing")
    batch(job, "per_device_train_batch_size", micro)
    length(job, "num_train_epochs", 3)
    schedule(job, "lr_scheduler_type", scheduler)
    evaluation_and_saving(job)
    without_evaluation(job)
    precision(job)
    checkpointing(job)
    trackers(job)


def batch(job: Translation, micro: str, default: int) -> None:
    """Translate the rows per step: micro-batch x accumulation x processes."""
    rows = job.get(micro, default)
    steps = job.get("gradient_accumulation_steps", 1)
    job.put("batch.micro_rows", rows, micro)
    if not isinstance(steps, int):  # a variable of a script that is set elsewhere
        reason = f"{shown(steps)} is not a number; set batch.rows, the rows of a step"
        job.say("gradient_accumulation_steps", "no counterpart", reason)
        return
    whole = rows * steps * job.processes
    job.set("batch.rows", whole)
    reason = f"batch.rows={whole} ({rows} x {steps} x {job.processes} processes)"
    job.say("gradient_accumulation_steps", "translated", reason)
    job.assumed.append(
        f"batch.rows={whole}: rows of a step over all processes, assumed to be "
        f"{job.processes}; --processes sets another number"
    )


def schedule(job: Translation, scheduler: str, usual: str, warmup: float = 0.0) -> None:
    """Translate learning rate, schedule, warmup, and the optimizer with its constants."""
    job.move("learning_rate", "optim.lr")
    name = text(job.get(scheduler, usual))
    job.put("optim.schedule", SCHEDULES.get(name, "cosine"), scheduler)
    if name not in SCHEDULES:
        job.say(scheduler, "no counterpart", f"{name}: replaced by optim.schedule=cosine")
    if scheduler not in job.source:
        job.assumed.append(f"optim.schedule={usual}: the other toolkit's default")
    if job.get("cosine_min_lr_ratio", 0) >= 1:
        job.set("optim.schedule", "constant")
        job.source["cosine_min_lr_ratio"] = 0
    _warmup(job, warmup)
    job.say("lr_scheduler_kwargs", "not needed", "the schedule has none")
    if job.get("lr_scheduler_kwargs") and job.fields["optim"]["schedule"] != "constant":
        job.move("lr_scheduler_kwargs", "optim.schedule_arguments")
    _optimizer(job, scheduler)
    job.move_all({"weight_decay": "optim.weight_decay", "adam_epsilon": "optim.eps"})
    job.move("max_grad_norm", "optim.max_grad_norm", lambda norm: norm or None)
    if {"adam_beta1", "adam_beta2"} & job.source.keys():
        betas = [job.get("adam_beta1", 0.9), job.get("adam_beta2", 0.999)]
        job.put("optim.betas", betas, "adam_beta1 adam_beta2")


def _warmup(job: Translation, usual: float) -> None:
    steps, share = job.get("warmup_steps"), job.get("warmup_ratio")
    if steps:
        job.move("warmup_steps", "optim.warmup")
        job.say("warmup_ratio", "not needed", "warmup_steps takes precedence")
        return
    job.say("warmup_steps", "translated", "optim.warmup=0")
    if share is None and steps is None and usual:
        job.assume("optim.warmup", usual)
    else:
        job.put("optim.warmup", share or 0.0, "warmup_ratio")


WIDE = "with exact moments, which need 6 more bytes of a trained weight, divided over the processes"


def _optimizer(job: Translation, scheduler: str) -> None:
    job.move("loraplus_lr_ratio", "optim.loraplus_lr_ratio")
    _groups(job)
    if job.get("use_muon"):
        job.put("optim.name", "muon", "use_muon")
        return
    key = "optimizer" if "optimizer" in job.source else "optim"
    name = text(job.get(key, "adamw_torch"))
    ours = OPTIMIZERS.get(name)
    backend = job.fields.get("backend", "single")
    by_rows = not backend.startswith("zero")
    if ours == "paged_adamw_8bit" and job.shards:
        ours = "adamw_8bit" if by_rows else "adamw"
        job.set("optim.name", ours)
        job.say(key, "differs", f"{name}: replaced by optim.name={ours}, whose state is not paged")
    elif ours in ("adamw_8bit", "adamw_4bit") and not by_rows:
        job.set("optim.name", "adamw")
        job.say(key, "differs", f"{name}: optim.name=adamw {WIDE}")
    elif ours is not None:
        if ours == "schedule_free_adamw":
            job.set("optim.schedule", "constant")
            job.say(scheduler, "differs", f"optim.schedule=constant: {name} needs none")
        job.put("optim.name", ours, key)
    elif name == "paged_adamw_32bit":
        job.say(key, "differs", f"{name}: replaced by optim.name=adamw, whose state is not paged")
    else:
        job.say(key, "no counterpart", f"{name}: replaced by optim.name=adamw")


def _groups(job: Translation) -> None:
    """Translate learning rates of their own, of embeddings and of axolotl's groups of modules."""
    rates = [
        ("|".join(map(re.escape, group["modules"])), group["lr"])
        for group in job.get("lr_groups") or ()
    ]
    if job.get("embedding_lr"):
        rates.append(("embed_tokens|lm_head", job.get("embedding_lr")))
    if rates:
        job.set("optim.groups", [{"match": match, "lr": lr} for match, lr in rates])
        job.say("lr_groups embedding_lr", "translated", "optim.groups")


def length(job: Translation, epochs: str, usual: int) -> None:
    """Translate epochs or steps, and the seed."""
    if _steps(job):
        job.set("epochs", usual)
        job.move_all({epochs: "epochs", "max_steps": "max_steps"})
    else:
        job.move_or_assume(epochs, "epochs", usual)
        job.say("max_steps", "not needed", "below 1: the number of epochs applies")
    job.move_or_assume("seed", "seed", 42)
    seeds = job.get("seed", 42), job.get("data_seed", job.get("seed", 42))
    outcome = "not needed" if seeds[0] == seeds[1] else "differs"
    job.say("data_seed", outcome, "seed also sets the order of rows")


def _steps(job: Translation) -> bool:
    steps = job.get("max_steps")
    return steps is not None and not (isinstance(steps, int) and steps < 1)


def evaluation_and_saving(job: Translation) -> None:
    for key, path in (("eval_steps", "evaluation.every"), ("save_steps", "saving.every")):
        job.move(key, path, lambda steps: steps or None)
    for key, path in (
        ("eval_strategy", "evaluation.every"), ("evaluation_strategy", "evaluation.every"),
        ("save_strategy", "saving.every"),
    ):  # fmt: skip
        word = text(job.get(key))
        if word == "epoch":
            job.put(path, "1 epoch", key)
        elif word == "steps":
            job.say(key, "translated", f"{path} counts steps")
        else:
            job.say(key, "differs", f"{word}: once, at the end of the run; or set {path}")
    job.move("save_total_limit", "saving.keep")
    usual = text(job.get("metric_for_best_model", "loss")) in ("loss", "eval_loss")
    outcome: Outcome = "not needed" if usual else "differs"
    job.say("metric_for_best_model", outcome, "the evaluation loss is used")
    job.say("greater_is_better", "differs", "the evaluation loss is used: lower is better")


def without_evaluation(job: Translation) -> None:
    """Leave out when to evaluate, if no rows are held out."""
    if job.fields.get("eval_rows") or job.fields.get("eval_data"):
        return
    job.fields.get("evaluation", {}).pop("every", None)
    keys = "eval_steps eval_strategy evaluation_strategy evals_per_epoch"
    job.say(keys, "not needed", "no rows are held out")


def precision(job: Translation) -> None:
    for key in ("bf16", "bfloat16", "pure_bf16"):
        if key in job.source:
            on = job.source[key] in (True, "auto", "full")
            reason = IN_BF16 if on else "give --precision fp32 for fp32"
            job.say(key, "translated" if on else "not needed", reason)
    for key in ("fp16", "float16"):
        if job.get(key):
            job.say(key, "differs", "bf16 instead, which needs no loss scaling")
        else:
            job.say(key, "not needed", IN_BF16)


def checkpointing(job: Translation) -> None:
    value, ours = job.get("gradient_checkpointing"), "model.activation_checkpointing"
    if job.get("activation_offloading"):
        job.put(ours, "offload", "gradient_checkpointing activation_offloading")
    elif value in (True, False, "offload"):
        job.move("gradient_checkpointing", ours)
    elif value is not None:
        job.set(ours, True)
        job.say("gradient_checkpointing", "differs", f"{shown(value)}: replaced by {ours}=true")
    job.say_off("activation_offloading")


def trackers(job: Translation) -> None:
    if "report_to" not in job.source:
        return
    words = [text(word) for word in listed(job.source["report_to"])]
    words = [OWN_TRACKERS.get(word, word) for word in words if word not in ("none", "false")]
    known = [word for word in words if word in TRACKERS or ":" in word]
    others = [word for word in words if word not in known]
    job.put("trackers", known, "report_to")
    if others:
        reason = f"{', '.join(others)}: supported trackers are {', '.join(TRACKERS)}"
        job.say("report_to", "differs", reason)


def the_rest(job: Translation) -> None:
    """Record the keys that do not affect training and have no outcome yet."""
    name = text(job.get("hub_model_id"))
    if "/" in name and not name.startswith("<"):
        job.move("hub_model_id", "saving.push_to")
    for key in job.source:
        if key not in job.outcomes and (reason := reason_of(key)):
            job.say([key], "not needed", reason)
    if not mapping(job.get("accelerator_config")).get("split_batches"):
        job.say("accelerator_config", "not needed", "gradients are summed over a step exactly")
    left = [key for key in job.source if key not in job.outcomes]
    usual = _defaults() if left else {}
    for key in left:
        is_off = not job.source[key] and not usual.get(key, True)
        if is_off or (key in usual and job.source[key] == usual[key]):
            job.say([key], "not needed", "it is off, or the default of transformers")


def _defaults() -> dict[str, Any]:
    """The defaults of transformers' TrainingArguments."""
    from transformers import TrainingArguments  # slow, and seldom needed

    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TrainingArguments)
    }


def token_loss(job: Translation) -> None:
    """Translate other losses of supervised fine-tuning than the cross-entropy."""
    if job.fields.get("method", "sft") not in ("sft", "pretrain"):
        return
    job.move("label_smoothing_factor", "label_smoothing")
    for key, weight in {"use_dft_loss": "dft", "use_eaft_loss": "eaft", "use_eaft": "eaft"}.items():
        if job.get(key):
            job.put("token_weight", weight, key)
            job.move("eaft_alpha", "eaft_alpha")
        job.say_off(key)
    same = job.get("eaft_k", 20) == 20
    reason = "the entropy of the 20 likeliest tokens is used"
    job.say("eaft_k", "not needed" if same else "differs", reason)
