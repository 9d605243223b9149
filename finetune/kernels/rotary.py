"""Rotary positions (arXiv:2104.09864) of query and key as one operation.

    y1 = x1 cos - x2 sin        x1, x2: the halves of a head
    y2 = x2 cos + x1 sin

That is x cos + (the other half) (sin, the sign of its first half turned), in place. transformers
makes four tensors of the size of x on the way, and as many for its gradient.
"""

import types
from typing import Any

import torch
from torch import nn

from finetune.kernels.chains import chain
from finetune.kernels.cpu import native

ATTENTIONS = (
    "LlamaAttention", "MistralAttention", "MixtralAttention", "Qwen2Attention", "Qwen3Attention",
    "Qwen2MoeAttention", "Qwen3MoeAttention", "GemmaAttention", "Gemma2Attention",
    "Gemma3Attention", "GraniteAttention", "SmolLM3Attention",
)  # fmt: skip
"""Classes of transformers 5.23 whose module rotates whole heads by this formula."""
ROTATION = "apply_rotary_pos_emb"
"""The name by which the forward pass of each calls it."""


def fuse_rotations(model: nn.Module) -> None:
    """Let the attention layers of a model that are known here rotate query and key as one."""
    for module in model.modules():
        kind = type(module)
        forward = kind.forward
        if kind.__name__ in ATTENTIONS and ROTATION in forward.__code__.co_names:
            fields = {"forward": _with_rotation(forward)}
            module.__class__ = type(kind.__name__, (FusedRotation, kind), fields)


def _with_rotation(forward: types.FunctionType) -> types.FunctionType:
    """A forward pass that finds our rotation by the name of its own; that of others stays."""
    names = {**forward.__globals__, ROTATION: rotate}
    changed = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


class FusedRotation:
    """Mixed into an attention layer of transformers, to be known by."""


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both (rows, heads, tokens, head size) rotated; tables (rows or 1, tokens, head size)."""
    return Rotation.apply(query, key, cos, sin)


class Rotation(torch.autograd.Function):
    """Keeps the tables, which all layers share. Gradients are rotated back."""

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
    """What each element's partner in the other half is multiplied by."""
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


@chain(native.rotated)
def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(query, cos, signed), _turned(key, cos, signed)


def _turned(x: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    wide = x.to(cos.dtype)  # tables are in the type of the hidden state
    first, second = wide.chunk(2, -1)
    partners = torch.cat([second, first], -1)
    return partners.mul_(signed).addcmul_(wide, cos).to(x.dtype)
