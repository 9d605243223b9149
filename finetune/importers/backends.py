"""Translate DeepSpeed files, FSDP's keys and sizes of a mesh to a backend."""

import json
from pathlib import Path
from typing import Any

from finetune.errors import reading
from finetune.importers.translation import Translation, mapping, shown

DEEPSPEED = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")


def translate(job: Translation, folder: Path) -> None:
    """Choose a backend from a DeepSpeed file, FSDP's keys, or the number of processes."""
    name = "single" if job.processes == 1 else "ddp"
    if job.get("deepspeed"):
        name = _deepspeed(job, folder) or name
    else:
        job.say("deepspeed", "not needed", "it is empty")
    job.say("fsdp fsdp_config fsdp_version", "not needed", "FSDP2 wraps layers automatically")
    if job.get("fsdp") or job.get("fsdp_config"):
        name = _fsdp(job)
    job.set("backend", name)
    _mesh(job)


AXES = {
    "tensor_parallel_size": ("tp", "--tensor"), "expert_parallel_size": ("ep_fsdp", "--experts"),
    "tensor_model_parallel_size": ("tp", "--tensor"),
    "pipeline_model_parallel_size": ("pp", "--pipeline"),
    "expert_model_parallel_size": ("ep_fsdp", "--experts"),
    "sequence_parallel_size": ("sp", "--sequence"), "context_parallel_size": ("cp", "--context"),
    "dp_replicate_size": ("hsdp", "--shard-size"), "dp_shard_size": ("fsdp_full_shard", ""),
}  # fmt: skip


def _mesh(job: Translation) -> None:
    """Translate the sizes of a device mesh to a backend and the options of its launch."""
    several = {key: size for key in AXES if isinstance(size := job.get(key), int) and size > 1}
    divided = [key for key in several if not key.startswith("dp_")]
    job.say(" ".join(AXES), "not needed", "one process")
    if len(divided) > 1 or ("dp_replicate_size" in several and divided):
        reason = "several axes, which change no loss: name a backend of `finetune list`"
        job.say(" ".join(several), "differs", reason)
        return
    for key in [key for key in AXES if key in several][:1]:
        name, option = AXES[key]
        size = job.get("dp_shard_size", 1) if key == "dp_replicate_size" else several[key]
        name = "tp_fsdp" if name == "tp" and "dp_shard_size" in several else name
        job.set("backend", name)
        words = f"backend={name}" + (f", launched with {option} {size}" if option else "")
        job.say(" ".join(several), "translated", words)


def _deepspeed(job: Translation, folder: Path) -> str | None:
    config = given = job.source["deepspeed"]
    paths = [] if isinstance(given, dict) else [folder / str(given), Path(str(given))]
    path = next((path for path in paths if path.is_file()), None)
    if path is not None:
        with reading(f"deepspeed: {path}: cannot be read"):
            config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config, dict):
        values = mapping(config.get("zero_optimization"))
        stage = str(values.get("stage"))
        sections = mapping(values.get("offload_param")), mapping(values.get("offload_optimizer"))
        devices = [section.get("device") for section in sections]
        offload = "_nvme" if "nvme" in devices else "_offload" if "cpu" in devices else ""
        known = f"its stage is {stage}"
    else:
        word = str(given).lower()
        stage = next((n for n in "123" if f"z{n}" in word or f"zero{n}" in word), "")
        offload = "_offload" if "offload" in word or "cpu" in word else ""
        known = "from its name, as the file was not found"
    name = f"zero{stage}{offload}"
    if name not in DEEPSPEED:
        reason = f"{shown(given)}: no such backend; known are {', '.join(DEEPSPEED)}"
        job.say("deepspeed", "no counterpart", reason)
        return None
    job.say("deepspeed", "translated", f"backend={name} ({known}); its other values are not used")
    return name


def _fsdp(job: Translation) -> str:
    config = {k.removeprefix("fsdp_"): v for k, v in mapping(job.get("fsdp_config")).items()}
    wanted: Any = job.get("fsdp") or []
    words = set(wanted if isinstance(wanted, list) else str(wanted).split())
    strategy = str(config.get("sharding_strategy", "")).lower()
    keep = "shard_grad_op" in words or strategy in ("shard_grad_op", "2")
    keep = keep or config.get("reshard_after_forward") in (False, "false")
    offload = "offload" in words or config.get("offload_params") in (True, "true")
    name = f"fsdp_{'shard_grad_op' if keep else 'full_shard'}{'_offload' if offload else ''}"
    hybrid = any("hybrid" in str(word).lower() for word in (*words, strategy))
    reason = f"backend={name}" + (", which shards over all processes" if hybrid else "")
    outcome = "differs" if hybrid else "translated"
    job.say("fsdp fsdp_config", outcome, f"{reason}; its other values are not used")
    return name
