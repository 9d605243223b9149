"""Translate torchtune's configurations, whose components are named by Python paths."""

import re
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import backends, trainer
from finetune.importers.translation import Translation, listed, text

DATA = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": ("", "messages", False), "text_completion_dataset": ("", "text", True),
    "instruct_dataset": ("", "alpaca", False), "preference_dataset": ("", "preference", False),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "alpaca_preference", False),
}  # fmt: skip
"""Source, format, and whether prompts are trained by default, by torchtune's builder."""
OPTIMIZERS = {
    "AdamW": "adamw", "PagedAdamW": "adamw", "AdamW8bit": "adamw_8bit", "SGD": "sgd",
    "PagedAdamW8bit": "paged_adamw_8bit", "Adam": "torch.optim:Adam", "Lion": "lion",
}  # fmt: skip
SCHEDULES = {"get_cosine_schedule_with_warmup": "cosine"}
LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss", "")
RENAMED = {"output_proj": "o_proj"}
MOVED = {
    "model.lora_rank": "adapter.r", "model.lora_alpha": "adapter.alpha",
    "model.lora_dropout": "adapter.dropout", "model.use_dora": "adapter.use_dora",
    "optimizer.lr": "optim.lr", "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.eps": "optim.eps", "optimizer.betas": "optim.betas",
    "lr_scheduler.num_warmup_steps": "optim.warmup", "dataset.packed": "batch.packing",
    "tokenizer.max_seq_len": "batch.max_length", "batch_size_val": "evaluation.micro_rows",
    "run_val_every_n_steps": "evaluation.every", "loss.beta": "beta",
    "loss.label_smoothing": "label_smoothing",
}  # fmt: skip


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe from a torchtune configuration.

    Raises:
        FinetuneError: no method here matches its loss or its data.
    """
    job.source = {k: v for k, v in _filled(_flat(job.source)).items() if v is not None}
    if job.get("kd_loss._component_"):
        _distillation(job)
    loss, builder = _name(job, "loss._component_"), _name(job, "dataset._component_")
    if loss not in (*LOSSES, "DPOLoss"):
        raise FinetuneError(f"loss: {loss}: supervised fine-tuning and DPO are imported")
    if builder not in DATA:
        known = ", ".join(DATA)
        raise FinetuneError(f"dataset: {builder}: expected one of {known}; rewrite it as such")
    taught = "distill" if "teacher" in job.fields else "sft"
    job.put("method", "dpo" if loss == "DPOLoss" else taught, "loss._component_")
    backends.translate(job, folder)
    job.move("checkpointer.checkpoint_dir", "model.name", text)
    if (reference := job.get("ref_checkpointer.checkpoint_dir")) != job.get(
        "checkpointer.checkpoint_dir"
    ) and reference:
        job.set("reference", text(reference))
    read = ("checkpointer.", "profiler.", "ref_checkpointer.", "teacher_checkpointer.")
    rest = [key for key in job.source if key.startswith(read) and key not in job.outcomes]
    job.say(rest, "not needed", "the model is read from its folder")
    _adapter(job)
    for key, path in (("dataset", "data"), ("dataset_val", "eval_data")):
        _data(job, key, path)
    trainer.batch(job, "batch_size", 1)
    schedule = _name(job, "lr_scheduler._component_")
    job.set("optim.schedule", "constant")
    job.set("optim.warmup", 0)
    if schedule in SCHEDULES:
        job.put("optim.schedule", SCHEDULES[schedule], "lr_scheduler._component_")
    name = _name(job, "optimizer._component_")
    if name in OPTIMIZERS:
        job.put("optim.name", OPTIMIZERS[name], "optimizer._component_")
    job.set("optim.weight_decay", 0.01)  # the default of torch.optim.AdamW and bitsandbytes
    job.put("optim.max_grad_norm", job.get("clip_grad_norm"), "clip_grad_norm")
    trainer.length(job, "epochs", 1)
    if job.get("epochs", 1) == 1:
        job.move("max_steps_per_epoch", "max_steps")
    job.set("batch.max_length", 4096)
    if "tokenizer.max_seq_len" in job.source:
        job.set("batch.overlong", "truncate")
    else:
        job.assumed.append("batch.max_length=4096: the other toolkit has no limit")
    job.move_all(MOVED)
    on = bool(job.get("enable_activation_checkpointing"))
    kept = "offload" if job.get("enable_activation_offloading") else on
    keys = "enable_activation_checkpointing enable_activation_offloading"
    job.put("model.activation_checkpointing", kept, keys)
    trainer.dtype(job)
    offload = job.get("fsdp_cpu_offload") or job.get("fsdp.cpu_offload")
    backend = "fsdp_full_shard_offload" if offload else job.fields["backend"]
    job.put("backend", backend, "fsdp_cpu_offload fsdp.cpu_offload")
    job.say("tensor_parallel_dim", "differs", "changes no loss: a backend of `finetune list`")
    trainer.the_rest(job)


KD_LOSSES = {
    "ForwardKLLoss": "forward_kl", "ForwardKLWithChunkedOutputLoss": "forward_kl",
    "ReverseKLLoss": "reverse_kl", "ReverseKLWithChunkedOutputLoss": "reverse_kl",
}  # fmt: skip


def _distillation(job: Translation) -> None:
    """Translate (1 - r) x cross-entropy + r x divergence, divided by r."""
    loss, share = _name(job, "kd_loss._component_"), job.get("kd_ratio", 0.5)
    if loss not in KD_LOSSES or not share:
        raise FinetuneError(f"kd_loss: {loss}, kd_ratio {share}: expected a divergence with weight")
    job.set("loss_type", KD_LOSSES[loss])
    job.set("teacher.name", text(job.get("teacher_checkpointer.checkpoint_dir")))
    job.set("ce_weight", round((1 - share) / share, 6))
    reason = f"ce_weight={job.fields['ce_weight']}: the loss is divided by kd_ratio"
    job.say("kd_ratio", "differs", f"{reason}, which AdamW does not see without clipping")
    keys = [key for key in job.source if key.startswith(("kd_loss.", "teacher_model."))]
    job.say(keys, "translated", f"method=distill, loss_type={KD_LOSSES[loss]}")


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Values with those that they name, such as `${batch_size}`."""
    for key, value in values.items():
        whole = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        values[key] = values.get(whole[1], value) if whole else value
    return values


def _flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in values.items():
        found |= _flat(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return found


def _name(job: Translation, key: str) -> str:
    return text(job.get(key, "")).rpartition(".")[2]


def _adapter(job: Translation) -> None:
    model = _name(job, "model._component_")
    attention = job.get("model.lora_attn_modules")
    packed = model.startswith("qlora_") or job.get("model.quantize_base")
    job.set("model.quantization", "nf4" if packed else "none")
    if attention is None:
        job.set("adapter", None)
        job.say("model._component_", "translated", "all weights of the model in its folder")
        return
    kind = "LoRA on a base in NF4" if packed else "LoRA"
    job.say("model._component_", "translated", f"{kind} of the model in its folder")
    job.say("model.quantize_base", "translated", "model.quantization=nf4")
    targets = [RENAMED.get(each, each) for each in map(text, listed(attention))]
    targets += ["gate_proj", "up_proj", "down_proj"] if job.get("model.apply_lora_to_mlp") else []
    targets += ["lm_head"] if job.get("model.apply_lora_to_output") else []
    keys = "model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output"
    job.put("adapter.targets", targets, keys)


def _data(job: Translation, key: str, path: str) -> None:
    builder = _name(job, f"{key}._component_")
    if builder not in DATA:
        return
    source, name, trains = DATA[builder]
    data: dict[str, Any] = {"source": text(job.get(f"{key}.source", source)), "format": name}
    files = job.get(f"{key}.data_files")
    data |= {"source": text(files)} if files else {}
    if builder == "chat_dataset" and job.get(f"{key}.conversation_style") == "sharegpt":
        data["format"] = "sharegpt"
    if isinstance(split := job.get(f"{key}.split"), str) and not files:
        data["split"] = split
    column = job.get(f"{key}.column", job.get(f"{key}.conversation_column"))
    wanted = {"sharegpt": "conversations", "messages": "messages", "text": "text"}
    if column and wanted.get(data["format"], column) != column:
        data["columns"] = {text(column): wanted[data["format"]]}
    if name == "alpaca_preference":
        data["columns"] = {"question": "instruction", "response_j": "chosen",
            "response_k": "rejected"}  # fmt: skip
    job.set(path, [data])
    if path == "data" and job.fields["method"] in ("sft", "distill"):
        job.set("train_on", "all" if job.get(f"{key}.train_on_input", trains) else "assistant")
    outcome = "differs" if "alpaca" in name else "translated"
    reason = f"{path}, format={data['format']}: the model's own chat template renders it"
    job.say(f"{key}._component_", outcome, reason)
    read = "source data_files split column conversation_style conversation_column train_on_input"
    job.say([f"{key}.{inner}" for inner in (*read.split(), "packed")], "translated", path)
