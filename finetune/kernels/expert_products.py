"""Products of experts in the data type of autocast, which does not know the operation for them."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from finetune.kernels.precision import compute_dtype

GROUPED = "grouped_mm"
"""The name of these products in transformers and, with an underscore or without, in torch."""


class _AsAutocast(TorchFunctionMode):
    """Inside, grouped products are in a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").lstrip("_") == GROUPED:
            args = tuple(each.to(self.dtype) for each in args)
        return func(*args, **(kwargs or {}))


def experts_forward(self: torch.nn.Module, hidden: torch.Tensor, *routing: Any) -> torch.Tensor:
    """As transformers' own of that name; on a GPU under autocast its products are in 16 bits.

    torch 2.13 lacks `grouped_mm` in autocast's list: experts whose weights are fp32 would multiply
    in fp32, by a slow loop over them. Engines that shard hold them in 16 bits already.
    """
    if hidden.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return moe.grouped_mm_experts_forward(self, hidden, *routing)
    with _AsAutocast(compute_dtype(hidden)):
        return moe.grouped_mm_experts_forward(self, hidden, *routing)


def compute_as_autocast() -> None:
    """Let the grouped products of experts be in the type that autocast computes in."""
    moe.ExpertsInterface.register(GROUPED, experts_forward)
