"""Quantize frozen base weights to four or eight bits, with bitsandbytes."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config

from finetune.errors import FinetuneError
from finetune.kernels.quantised import Linear4bit, Linear8bitLt
from finetune.models.load_checks import full_shape
from finetune.planner.shapes.prequantised import DEQUANTISED, stored_kind
from finetune.version import missing

QUANTISED = (Linear4bit, Linear8bitLt)
MOST_NAMED = 5
"""Maximum number of tensors that a note names."""


def quantization_config(
    kind: str,
    compute: torch.dtype,
    storage: torch.dtype = torch.uint8,
    kept: list[str] | None = None,
) -> BitsAndBytesConfig | None:
    """bitsandbytes' configuration: NF4 with double quantization, or LLM.int8; None for `none`.

    `compute` is the type of a layer's products. `storage` is the type of packed weights, because
    FSDP shards floating-point tensors only. `kept` are names of modules that are not quantized.
    """
    if kind == "none":
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise FinetuneError(f"model.quantization: {kind} needs {missing('bitsandbytes')}")
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    if kind != "nf4":
        raise FinetuneError(f"model.quantization: got '{kind}', expected none, nf4 or int8")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
        llm_int8_skip_modules=kept,
    )


def loading_arguments(
    fields: Mapping[str, Any],
    kind: str,
    compute: torch.dtype,
    storage: torch.dtype = torch.uint8,
    kept: list[str] | None = None,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for quantization, for a model with this `config.json`.

    With `quantization_config=None`, transformers 5.23 ignores that the files are quantized, and
    reads their codes as weights.
    """
    stored = stored_kind(fields)
    if stored is None:
        asked = quantization_config(kind, compute, storage, kept)
        return {} if asked is None else {"quantization_config": asked}
    if stored in DEQUANTISED:
        config = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[stored]
        return {"quantization_config": config(dequantize=True)}
    return {}


def placed_while_loading(quantised: bool, shards_all: bool) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load a quantized model into host memory for sharding.

    By default, transformers 5.23 loads the complete model to the GPU of each process. FSDP2 moves
    one unit at a time to its GPU and keeps a shard, so no GPU holds more than one complete unit.
    """
    return {"device_map": {"": "cpu"}} if quantised and shards_all else {}


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the compute type of NF4 layers; files that are already quantized have their own."""
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.compute_dtype = dtype
            layer.compute_type_is_set = True


def quantised_notes(model: nn.Module, kind: str) -> list[str]:
    """A note on how much of a base is actually quantized, and what is not.

    bitsandbytes replaces linear layers. Embeddings, the head, and experts that transformers 5
    stores in three-dimensional parameters are not quantized.
    """
    if kind == "none":
        return []
    small = {id(layer.weight) for layer in model.modules() if isinstance(layer, QUANTISED)}
    sizes: dict[str, int] = {}
    total = packed = 0
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            continue
        size = full_shape(parameter).numel()
        total += size
        if id(parameter) in small:
            packed += size
        elif len(full_shape(parameter)) > 1:
            inner = re.sub(r"^.*?\.\d+\.|^model\.", "", name)
            inner = re.sub(r"\.base_layer|\.original_module|\.weight$", "", inner)
            sizes[inner] = sizes.get(inner, 0) + size
    ordered = sorted(sizes, key=lambda inner: -sizes[inner])
    plain = ", ".join(f"{inner} ({sizes[inner] / total:.1%})" for inner in ordered[:MOST_NAMED])
    return [
        f"model.quantization: {packed / total:.1%} of the base's weights are in {kind}; "
        f"not quantised: {plain or 'vectors'}"
    ]


def keep_unpacked(model: nn.Module) -> None:
    """Make NF4 layers compute the same in evaluation as in training, on CPUs with AVX512-BF16.

    There, bitsandbytes (0.50) repacks the weights at the first forward pass without gradients, for
    a faster kernel. That kernel accumulates in bf16, refuses layers with other than 32n rows and
    64n columns, and makes later gradients silently wrong.
    """
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
