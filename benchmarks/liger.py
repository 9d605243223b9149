"""Liger's Triton kernels (`pip install liger-kernel`), for comparison on GPUs.

The functions return a kernel, or None if it is not available.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Kernel = Callable[..., Any]


def here(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def version() -> str:
    return importlib.metadata.version("liger-kernel")


def norm(device: str, plain: nn.Module) -> Kernel | None:
    """RMS norm with the weights of a norm of transformers."""
    if not here(device):
        return None
    from liger_kernel.transformers import LigerRMSNorm

    made = LigerRMSNorm(plain.weight.shape[0], eps=plain.variance_epsilon, in_place=False)
    made.weight = plain.weight
    return made


def gated_unit(device: str) -> Kernel | None:
    """SiLU(gate) * up."""
    if not here(device):
        return None
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def rotation(device: str) -> Kernel | None:
    """Rotary embedding of query and key, from tables of cosines and sines."""
    if not here(device):
        return None
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    def rotate(query: torch.Tensor, key: torch.Tensor, *tables: torch.Tensor) -> Any:
        return liger_rotary_pos_emb(query.clone(), key.clone(), *tables)  # in place

    return rotate


def loss_of_head(device: str) -> Kernel | None:
    """Head and loss, from the head's weight, hidden states of all rows, and targets."""
    if not here(device):
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")
