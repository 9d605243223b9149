"""Read a file for Accelerate's Megatron-LM plugin, and name the backend that divides the same way.

There is no engine for it: Accelerate 1.15 imports `megatron.training` and `megatron.legacy`, which
are in a source checkout of Megatron-LM, but not in the package `megatron-core`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from finetune.errors import did_you_mean

KIND = "MEGATRON_LM"
"""Accelerate's `distributed_type`."""
NAME = "megatron"
SECTION = "megatron_lm_config"
PREFIX = "megatron_lm_"
KEYS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "attention_backend", "attention_dropout", "attention_softmax_in_fp32",
        "calculate_per_token_loss", "context_parallel_size", "decoder_last_pipeline_num_layers",
        "eod_mask_loss", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "gradient_clipping", "hidden_dropout", "no_load_optim", "no_save_optim",
        "num_micro_batches", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
        "pp_degree", "recompute_activations", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "sequence_parallelism", "tp_degree", "use_custom_fsdp",
        "use_distributed_optimizer", "use_precision_aware_optimizer",
        "use_rotary_position_embeddings",
    )
)  # fmt: skip
"""Keys that the launcher of Accelerate 1.15 reads; it silently ignores all others."""
AXES = {"pipeline": "pp_degree", "context": "context_parallel_size", "tensor": "tp_degree"}
"""Our axes, and the keys of their sizes."""
REASON = (
    "Megatron-LM has no backend here: Accelerate's plugin needs GPUs and a source checkout of "
    "Megatron-LM (the package megatron-core lacks megatron.training), whose engine replaces this "
    "toolkit's loss and training step"
)
INSTEAD = "use pp_tp_fsdp, sp_tp or ep_tp (--pipeline, --tensor, --sequence, --experts)"


def problems(config: Mapping[str, Any]) -> list[str]:
    """Every problem of a file: its keys and sizes, and that no backend runs it."""
    given = config.get(SECTION)
    if given is not None and not isinstance(given, dict):
        return [f"{SECTION}: expected keys and values, got {given!r}", f"{REASON}; {INSTEAD}"]
    section = cast(dict[str, Any], given or {})
    found = [*_keys(section), *_sizes(section, config.get("num_processes"))]
    return [*found, f"{REASON}; {INSTEAD if found else _instead(section, config)}"]


def _keys(section: Mapping[str, Any]) -> Iterator[str]:
    for key in section:
        if key not in KEYS:
            full = f"{PREFIX}{key}"
            hint = f"; did you mean '{full}'?" if full in KEYS else did_you_mean(str(key), KEYS)
            yield f"{SECTION}.{key}: unknown key, which Accelerate ignores{hint}"


def _sizes(section: Mapping[str, Any], processes: object) -> Iterator[str]:
    sizes = {key: section.get(f"{PREFIX}{key}", 1) for key in (*AXES.values(), "num_micro_batches")}
    wrong = {key: size for key, size in sizes.items() if type(size) is not int or size < 1}
    for key, size in wrong.items():
        yield f"{SECTION}.{PREFIX}{key}: got {size!r}, expected a whole number of at least 1"
    if wrong or type(processes) is not int or processes < 1:
        return
    unit = math.prod(sizes[key] for key in AXES.values())
    if processes % unit:
        yield (
            f"num_processes: {processes} is not a multiple of the {unit} processes that "
            f"{SECTION} divides a model over"
        )
    if sizes["pp_degree"] > sizes["num_micro_batches"]:
        yield (
            f"{SECTION}.{PREFIX}num_micro_batches: {sizes['num_micro_batches']} for "
            f"{sizes['pp_degree']} stages leaves stages without work"
        )


def _instead(section: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The command line of the backend with the same axes."""
    sizes = {axis: int(section.get(f"{PREFIX}{key}", 1)) for axis, key in AXES.items()}
    used = {axis: size for axis, size in sizes.items() if size > 1}
    short = {"pipeline": "pp", "context": "cp", "tensor": "tp"}
    if not used or ("context" in used and len(used) > 1):
        return INSTEAD
    name = "_".join(short[axis] for axis in used)
    rest = config.get("num_processes")
    if isinstance(rest, int) and rest > math.prod(used.values()) and "context" not in used:
        name += "_fsdp"
    return f"use --backend {name} " + " ".join(f"--{axis} {size}" for axis, size in used.items())
