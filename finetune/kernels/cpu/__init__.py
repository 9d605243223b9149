"""CPU kernels, compiled from C and C++; code outside this folder imports only this module.

Submodules are loaded on first use, so training on an accelerator loads none.
"""

import ctypes
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.kernels.cpu.attention import (
        attention_of_documents,
        by_products,
        longest_served,
        release,
    )
    from finetune.kernels.cpu.compiler import COMPILERS, LANGUAGES
    from finetune.kernels.cpu.native import reason_against as reason_against_chains
    from finetune.kernels.cpu.noise import draw
    from finetune.kernels.cpu.pool import handed_out, keep_sizes, use_pool
    from finetune.kernels.cpu.pool import settle as settle_pool
    from finetune.kernels.cpu.tiled_adapters import products as adapter_products
    from finetune.kernels.cpu.tiled_adapters import reason_against as reason_against_adapter_tiles
    from finetune.kernels.cpu.tiled_adapters import serves as serves_adapter_tiles
    from finetune.kernels.cpu.tiled_attention import (
        reason_against as reason_against_attention_tiles,
    )

__all__ = [
    "COMPILERS",
    "LANGUAGES",
    "adapter_products",
    "attention_of_documents",
    "by_products",
    "draw",
    "handed_out",
    "keep_sizes",
    "longest_served",
    "reason_against_adapter_tiles",
    "reason_against_attention_tiles",
    "reason_against_chains",
    "release",
    "return_free_memory",
    "serves_adapter_tiles",
    "settle_pool",
    "twin",
    "use_pool",
]

HOMES = {
    "COMPILERS": "compiler.COMPILERS",
    "LANGUAGES": "compiler.LANGUAGES",
    "adapter_products": "tiled_adapters.products",
    "attention_of_documents": "attention.attention_of_documents",
    "by_products": "attention.by_products",
    "draw": "noise.draw",
    "handed_out": "pool.handed_out",
    "keep_sizes": "pool.keep_sizes",
    "longest_served": "attention.longest_served",
    "reason_against_adapter_tiles": "tiled_adapters.reason_against",
    "reason_against_attention_tiles": "tiled_attention.reason_against",
    "reason_against_chains": "native.reason_against",
    "release": "attention.release",
    "serves_adapter_tiles": "tiled_adapters.serves",
    "settle_pool": "pool.settle",
    "use_pool": "pool.use_pool",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'finetune.kernels.cpu' has no attribute '{name}'")
    module, _, attribute = HOMES[name].partition(".")
    return getattr(importlib.import_module(f"finetune.kernels.cpu.{module}"), attribute)


def twin(name: str) -> Callable[..., Any]:
    """The C implementation of a chain by name; it returns None for unsupported tensors."""
    from finetune.kernels.cpu import native

    return getattr(native, name)


def return_free_memory() -> None:
    """Return freed memory of the C library to the system, if it is glibc.

    Its `malloc` (2.36) leaves a gap of the size of a matrix after each layer of a model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
