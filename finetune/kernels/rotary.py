"""Rotary position embeddings (arXiv:2104.09864) of query and key as one operation.

    y1 = x1 cos - x2 sin        x1, x2: the halves of a head
    y2 = x2 cos + x1 sin

This is x cos + (x with its halves swapped) * (sin with its first half negated), computed in place.
transformers creates four temporary tensors of the size of x, and four more for the gradient.
"""

import types
from typing import Any

import torch
from torch import nn

from finetune.kernels.mixin import mix_in
from finetune.kernels.pointwise import chain
from finetune.planner.families import fused_classes

ATTENTIONS = {f"{name}Attention" for name, _ in fused_classes("rotary")}
"""Classes of transformers 5.23 that rotate complete heads by this formula."""
ROTATION = "apply_rotary_pos_emb"
"""Name of the function that their forward passes call."""


def fuse_rotations(model: nn.Module) -> None:
    """Fuse the rotation of query and key in the supported attention layers of a model."""
    for module in model.modules():
        kind = type(module)
        forward = kind.forward
        if kind.__name__ in ATTENTIONS and ROTATION in forward.__code__.co_names:
            mix_in(module, FusedRotation, forward=_with_rotation(forward))


def _with_rotation(forward: types.FunctionType) -> types.FunctionType:
    """Copy a forward pass with globals in which `ROTATION` is `rotate`; others keep theirs."""
    names = {**forward.__globals__, ROTATION: rotate}
    changed = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


class FusedRotation:
    """Mixin that marks an attention layer of transformers."""


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key, (rows, heads, tokens, head size) each.

    The tables `cos` and `sin` are (rows or 1, tokens, head size).
    """
    return Rotation.apply(query, key, cos, sin)


class Rotation(torch.autograd.Function):
    """Saves only the tables, which all layers share; gradients are rotated back."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _both(query, key, cos, _signed(sin))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_both(*grads, cos, _signed(sin).roll(sin.shape[-1] // 2, -1)), None, None


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Factor of each element's partner in the other half."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _both(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    rows, _, tokens, size = query.shape
    tables = (each.expand(rows, tokens, size).reshape(-1, 1, size) for each in (cos, signed))
    places = (each.transpose(1, 2).flatten(0, 1) for each in (query, key))
    turned = rotated(*places, *tables)  # (rows x tokens, heads, head size) each
    return tuple(each.unflatten(0, (rows, tokens)).transpose(1, 2) for each in turned)


@chain
def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(query, cos, signed), _turned(key, cos, signed)


def _turned(x: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    wide = x.to(cos.dtype)  # tables have the type of the hidden states
    first, second = wide.chunk(2, -1)
    partners = torch.cat([second, first], -1)
    return partners.mul_(signed).addcmul_(wide, cos).to(x.dtype)
