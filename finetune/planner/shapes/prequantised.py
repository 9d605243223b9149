"""How the files of a model are quantized, as its `config.json` says."""

from collections.abc import Mapping
from typing import Any, cast

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
