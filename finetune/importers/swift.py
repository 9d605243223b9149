"""Translate ms-swift's arguments: its command line, a YAML file, or the args.json of a run."""

import math
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import backends, preference_methods, trainer
from finetune.importers.command_line import COMMAND, PROGRAM
from finetune.importers.translation import Translation, listed, shown, text

METHODS: dict[str, dict[str, str]] = {
    "sft": {"method": "sft"}, "pt": {"method": "pretrain"}, "rm": {"method": "reward"},
    "cpo": {"method": "cpo"}, **preference_methods.AXOLOTL,
}  # fmt: skip
FORMATS = {"sft": "messages", "pretrain": "messages", "kto": "kto"}
OVERLONG = {"delete": "drop", "left": "truncate", "right": "truncate", "raise": "error"}
TRAINED = {"default": "assistant", "last_round": "completion", "all": "all"}
MOVED = {
    "model": "model.name", "model_revision": "model.revision", "adapters": "model.adapter",
    "max_length": "batch.max_length", "packing": "batch.packing",
    "per_device_eval_batch_size": "evaluation.micro_rows", "beta": "beta",
    "early_stop_interval": "evaluation.patience",
    "router_aux_loss_coef": "model.router_aux_loss", "label_smoothing": "label_smoothing",
    "rpo_alpha": "sft_weight", "cpo_alpha": "sft_weight", "simpo_gamma": "gamma",
    "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight",
}  # fmt: skip
ADAPTER = {
    "lora_rank": ("r", 8), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05),
    "target_modules": ("targets", "all-linear"), "modules_to_save": ("modules_to_save", []),
    "use_rslora": ("use_rslora", False), "use_dora": ("use_dora", False),
}  # fmt: skip
NOT_NEEDED = {
    "prepared rows are cached by their content": "load_from_cache_file",
    "rows are prepared once, in parallel": "dataset_num_proc lazy_tokenize",
    "text reaches no tower": "freeze_vit freeze_aligner vit_gradient_checkpointing vit_lr "
        "aligner_lr max_pixels",
    "kernels of the same computation are chosen by kernels":
        "use_liger_kernel experts_impl padding_free",
    "the launcher starts the processes": "num_processes ddp_backend",
    "its names are those of swift/self-cognition, which is not among the data":
        "model_author model_name",
    "the hub of Hugging Face is used": "use_hf",
    "answers are sampled by `finetune eval`": "max_new_tokens temperature top_p top_k",
    "config.json has it": "model_type task_type",
}  # fmt: skip


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe from ms-swift's arguments.

    Raises:
        FinetuneError: no method here matches the kind of training.
    """
    command = text(job.get(COMMAND, "rlhf" if job.get("rlhf_type") else "sft"))
    kind = text(job.get("rlhf_type", "dpo")) if command == "rlhf" else command
    if kind not in METHODS or job.get("task_type", "causal_lm") != "causal_lm":
        given = kind if kind not in METHODS else f"task_type: {shown(job.get('task_type'))}"
        raise FinetuneError(
            f"{given}: sft, pt and rlhf_type of dpo, orpo, simpo, kto, cpo and rm are imported; "
            "write the recipe with `finetune init`"
        )
    for field, value in METHODS[kind].items():
        job.set(field, value)
    if kind == "simpo":
        for field, value in (("beta", 2.0), ("gamma", 1.0), ("sft_weight", 1.0)):
            job.set(field, value)
            job.assumed.append(f"{field}={value}: the other toolkit's default")
    for key in (PROGRAM, COMMAND, "rlhf_type"):
        job.say(key, "translated", f"method={job.fields['method']}")
    backends.translate(job, folder)
    tuned = text(job.get("tuner_type", job.get("train_type", "lora")))
    if tuned not in ("lora", "full"):
        raise FinetuneError(f"tuner_type: {tuned}: expected lora or full")
    trainer.attention(job, "attn_impl")
    trainer.dtype(job)
    _adapter(job, tuned == "full")
    _data(job)
    job.set("optim.lr", 1e-5 if tuned == "full" else 1e-4)
    job.set("batch.max_length", 4096)
    if "max_length" not in job.source:
        job.assumed.append("batch.max_length=4096: the other toolkit has no limit")
    micro = job.get("per_device_train_batch_size", 1)
    if "gradient_accumulation_steps" not in job.source and isinstance(micro, int):
        steps = math.ceil(16 / micro / job.processes)
        job.source["gradient_accumulation_steps"] = steps
        job.assumed.append("batch.rows=16: the other toolkit's default")
    cut = text(job.get("truncation_strategy", "delete"))
    job.set("batch.overlong", OVERLONG.get(cut, "drop"))
    if cut in OVERLONG:
        outcome = "differs" if cut == "left" else "translated"
        job.say("truncation_strategy", outcome, f"batch.overlong={OVERLONG[cut]}")
    for key, path, usual in (
        ("weight_decay", "optim.weight_decay", 0.1), ("max_grad_norm", "optim.max_grad_norm", 1.0),
    ):  # fmt: skip
        job.move_or_assume(key, path, usual)
    job.set("optim.betas", [0.9, 0.95])
    job.assumed.append("optim.betas=[0.9, 0.95]: the other toolkit's default")
    job.held_out("split_dataset_ratio")
    job.set("model.activation_checkpointing", True)
    trainer.arguments(job, 1, "cosine")
    job.move_all(MOVED)
    for key in ("rpo_alpha", "cpo_alpha"):
        job.say(key, "differs", "sft_weight: the mean over a pair's tokens, not a batch's")
    loss = text(job.get("loss_scale", "default"))
    if loss in TRAINED and job.fields["method"] == "sft":
        job.set("train_on", TRAINED[loss])
        job.say("loss_scale", "translated", f"train_on={TRAINED[loss]}")
    job.say("streaming", "differs", "all rows are prepared before the first step")
    name = text(job.get("template"))
    job.say("template", "differs", f"{name}: the tokenizer's own template, or model.chat_template")
    if "enable_thinking" in job.source:
        job.set("model.chat_template_kwargs", {"enable_thinking": job.source["enable_thinking"]})
        job.say("enable_thinking", "translated", "model.chat_template_kwargs")
    if "swift/self-cognition" in str(job.get("dataset")):
        job.outcomes |= {k: ("no counterpart", "its data set fills in this name")
            for k in ("model_author", "model_name") if k in job.source}  # fmt: skip
    for reason, keys in NOT_NEEDED.items():
        job.say_all(
            "not needed", {reason: " ".join(k for k in keys.split() if k not in job.outcomes)}
        )
    trainer.the_rest(job)


def _adapter(job: Translation, full: bool) -> None:
    for key in ("tuner_type", "train_type"):
        job.say(key, "translated", "adapter=null" if full else "adapter")
    bits = {4: "nf4", 8: "int8"}.get(job.get("quant_bits"), "none")
    job.set("model.quantization", bits)
    usual = text(job.get("quant_method", "bnb")) == "bnb"
    if usual:
        for key in (
            "quant_bits",
            "quant_method",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
        ):
            job.say(key, "translated", f"model.quantization={bits}")
        job.say("bnb_4bit_compute_dtype", "not needed", "backends compute in bf16 by default")
    if full:
        job.set("adapter", None)
        for key in ADAPTER:
            job.say(key, "not needed", "no adapter: all weights are trained")
        return
    for key, (field, value) in ADAPTER.items():
        job.move_or_assume(key, f"adapter.{field}", value)


def _data(job: Translation) -> None:
    name = FORMATS.get(job.fields["method"], "preference")
    for key, path in (("dataset", "data"), ("val_dataset", "eval_data")):
        sources, some = list[dict[str, Any]](), False
        for given in listed(job.get(key, [])):
            source, _, first = text(given).partition("#")
            source, _, subset = source.removeprefix("HF::").partition(":")
            sources.append({"source": source, "format": name})
            sources[-1] |= {"subset": subset} if subset else {}
            sources[-1] |= {"first": int(first)} if first.isdecimal() else {}
            some = some or first.isdecimal()
        job.set(path, sources)
        hub = not job.get("use_hf") and any(not Path(s["source"]).suffix for s in sources)
        told = "; ids are of ModelScope: name the data set on the hub of Hugging Face, or its files"
        chosen = "; the first rows are read, not a random choice" if some else ""
        told = f"{told if hub else ''}{chosen}"
        job.say(key, "differs" if told else "translated", f"{path}{told}")
    trainer.formats(job)
