"""Models whose files are quantised already: which of them can be trained, and what to do instead.

Only `config.json` is read, so `finetune plan` reports the problem before anything is loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from finetune.backend import Backend
from finetune.planner.kernels import model_fields
from finetune.recipe import Recipe

DEQUANTISED = ("fp8", "mxfp4")
"""Kinds that transformers 5.23 can turn into plain weights while it loads them, on any device."""

BITSANDBYTES = {"nf4": "NF4", "int8": "LLM.int8"}
"""Kinds that stay as they are: the same as `model.quantization` makes of plain weights."""


def stored_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation that a `config.json` states; empty for plain weights."""
    inner = fields.get("text_config")
    for place in (fields, cast(dict[str, Any], inner) if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, dict) and found:
                return cast(dict[str, Any], found)
    return {}


def stored_kind(fields: Mapping[str, Any]) -> str | None:
    """How the weights of a `config.json` are stored, such as `nf4` or `fp8`; None as they are."""
    stored = stored_config(fields)
    if not stored:
        return None
    method = str(stored.get("quant_method") or "bitsandbytes")
    if "bitsandbytes" not in method:
        return method
    if stored.get("load_in_4bit") or stored.get("_load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return "int8"


def storage_of(fields: Mapping[str, Any]) -> str:
    """What packs the bits of NF4 weights, by its name in torch."""
    return str(stored_config(fields).get("bnb_4bit_quant_storage", "uint8"))


def problems(name: str, fields: Mapping[str, Any], asked: str, backend: Backend) -> Iterator[str]:
    """Why a model that is quantised already cannot be trained as a recipe asks.

    Args:
        name: What the recipe calls the model.
        fields: Of its `config.json`.
        asked: `model.quantization`.
        backend: FSDP shards floating point tensors only.
    """
    kind = stored_kind(fields)
    if kind is None:
        return
    have = f"model.name: the weights of '{name}' are stored in {kind}"
    unquantised = "name the model that it was made from"
    if kind in BITSANDBYTES:
        if asked != kind:
            yield (
                f"{have} ({BITSANDBYTES[kind]} of bitsandbytes), and model.quantization is "
                f"'{asked}'; set model.quantization={kind} and an adapter, or {unquantised}"
            )
        elif kind == "nf4" and backend.engine == "fsdp" and "float" not in storage_of(fields):
            yield (
                f"{have} packed in {storage_of(fields)}, and {backend.name} shards floating point "
                f"tensors only; {unquantised}, or use a backend that keeps parameters whole "
                "(ddp, zero2)"
            )
    elif kind in DEQUANTISED:
        if asked != "none":
            yield (
                f"{have}, and model.quantization={asked} would quantise them again; use "
                f"model.quantization=none, which turns them into plain weights, or {unquantised}"
            )
    else:
        yield f"{have}, which cannot be trained here; {unquantised}"


def prequantised(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """`problems` of a recipe whose model's `config.json` is on this machine."""
    name = recipe.model.name
    if name is not None:
        yield from problems(name, model_fields(recipe), recipe.model.quantization, backend)
