"""Attention of documents over tiles, next to the same in fp64."""

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.kernels.cpu.tiled_attention import TiledAttention

NEAR = 6e-3
"""Relative, of a tensor: weights and their gradients are rounded to the 8 bits of bf16."""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(tokens: int, query_heads: int, key_heads: int, size: int) -> Heads:
    """As projections make them.  # (1, heads, tokens, size) each"""
    torch.manual_seed(tokens + size)
    made = [
        torch.randn(1, tokens, count, size).bfloat16().transpose(1, 2).requires_grad_()
        for count in (query_heads, key_heads, key_heads)
    ]
    return made[0], made[1], made[2]


def of_each(
    given: Heads, ends: list[int], scale: float, window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    """Attention of each document by itself, in the type of what is given."""
    parts: list[torch.Tensor] = []
    for start, end in itertools.pairwise(ends):
        query, key, value = (each[:, :, start:end] for each in given)
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores = query @ key.transpose(2, 3) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        every = torch.ones(scores.shape[2:], dtype=torch.bool)
        unseen = every.triu(1) | every.tril(-(window or end - start))
        parts.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value)
    return torch.cat(parts, 2)


def with_gradients(mixed: torch.Tensor, given: Heads) -> list[torch.Tensor]:
    torch.manual_seed(1)
    grad = torch.randn(mixed.shape).bfloat16().to(mixed.dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, given, grad)]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-2))


def exactly(given: Heads, *how: Any) -> list[torch.Tensor]:
    """Result and gradients in fp64."""
    wide = tuple(each.detach().double().requires_grad_() for each in given)
    return with_gradients(of_each(wide, *how), wide)


def tiled(given: Heads, *how: Any) -> list[torch.Tensor]:
    return with_gradients(TiledAttention.apply(*given, *how), given)


def assert_near(given: Heads, *how: Any) -> list[torch.Tensor]:
    """Result and gradients over tiles are those of fp64. Returns them."""
    ours = tiled(given, *how)
    for found, wanted in zip(ours, exactly(given, *how), strict=True):
        assert apart(found, wanted) <= NEAR
    return ours


class Operations(TorchDispatchMode):
    """Counts attentions over tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.tiled = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tiled += "document_attention" in str(func)
        return func(*args, **(kwargs or {}))
