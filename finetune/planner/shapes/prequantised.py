"""Check whether a model whose files are already quantized can be trained.

Only `config.json` is read, so `finetune plan` reports the problem before anything is loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from finetune.backend import Backend
from finetune.planner.engines import TRAITS
from finetune.planner.shapes.config_files import model_fields
from finetune.recipe import Recipe

DEQUANTISED = ("fp8", "mxfp4")
"""Quantization methods that transformers 5.23 can dequantize while loading, on any device."""

BITSANDBYTES = {"nf4": "NF4", "int8": "LLM.int8"}
"""Quantization methods that are kept, the same as `model.quantization` produces."""


def stored_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings in a `config.json`; empty for unquantized weights."""
    inner = fields.get("text_config")
    for place in (fields, cast(dict[str, Any], inner) if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, dict) and found:
                return cast(dict[str, Any], found)
    return {}


def stored_kind(fields: Mapping[str, Any]) -> str | None:
    """Quantization method of a `config.json`, such as `nf4` or `fp8`; None if not quantized."""
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
    """Name of the torch data type in which NF4 weights are packed."""
    return str(stored_config(fields).get("bnb_4bit_quant_storage", "uint8"))


def problems(name: str, fields: Mapping[str, Any], asked: str, backend: Backend) -> Iterator[str]:
    """Why a model that is already quantized cannot be trained as the recipe requests.

    Args:
        name: Name of the model in the recipe.
        fields: Fields of its `config.json`.
        asked: `model.quantization`.
        backend: Its engine may shard only floating point tensors.
    """
    kind = stored_kind(fields)
    if kind is None:
        return
    have = f"model.name: the weights of '{name}' are stored in {kind}"
    unquantised = "use the model that it was made from"
    if kind in BITSANDBYTES:
        if asked != kind:
            yield (
                f"{have} ({BITSANDBYTES[kind]} of bitsandbytes), and model.quantization is "
                f"'{asked}'; set model.quantization={kind} and an adapter, or {unquantised}"
            )
        elif (
            kind == "nf4"
            and TRAITS[backend.engine].floats_only
            and "float" not in storage_of(fields)
        ):
            yield (
                f"{have} packed in {storage_of(fields)}, and {backend.name} shards floating point "
                f"tensors only; {unquantised}, or use a backend that keeps parameters unsharded "
                "(ddp, zero2)"
            )
    elif kind in DEQUANTISED:
        if asked != "none":
            yield (
                f"{have}, and model.quantization={asked} would quantize them again; set "
                f"model.quantization=none, which dequantizes them, or {unquantised}"
            )
    else:
        yield f"{have}, which cannot be trained here; {unquantised}"


def prequantised(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """`problems` for the model of a recipe, if its `config.json` is on this machine."""
    name = recipe.model.name
    if name is not None:
        yield from problems(name, model_fields(recipe), recipe.model.quantization, backend)
