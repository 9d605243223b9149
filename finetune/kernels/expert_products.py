"""Compute grouped expert products in autocast's data type, since autocast does not cover them."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from finetune.kernels.precision import compute_dtype

GROUPED = "grouped_mm"
"""Name of the operation in transformers and, with or without a leading underscore, in torch."""


class _AsAutocast(TorchFunctionMode):
    """Casts the inputs of grouped products to a data type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").lstrip("_") == GROUPED:
            args = tuple(each.to(self.dtype) for each in args)
        return func(*args, **(kwargs or {}))


def experts_forward(self: torch.nn.Module, hidden: torch.Tensor, *routing: Any) -> torch.Tensor:
    """transformers' grouped forward pass of experts, in 16 bits on GPUs under autocast.

    torch 2.13 does not autocast `grouped_mm`: experts with fp32 weights would be multiplied in
    fp32, by a slow loop over the experts. Sharding engines already provide them in 16 bits.
    """
    if hidden.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return moe.grouped_mm_experts_forward(self, hidden, *routing)
    with _AsAutocast(compute_dtype(hidden)):
        return moe.grouped_mm_experts_forward(self, hidden, *routing)


def compute_as_autocast() -> None:
    """Make the grouped products of experts use autocast's data type."""
    moe.ExpertsInterface.register(GROUPED, experts_forward)
