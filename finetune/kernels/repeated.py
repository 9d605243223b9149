"""Repeat tokens that documents share; gradients of the repetitions are summed in fp32."""

from typing import Any

import torch


def repeated(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Copy tokens of (1, heads, tokens, head size) to (1, heads, repeated tokens, head size).

    Args:
        states: Queries, keys or values.
        tokens: (repeated tokens,) int64, the index of the token of each copy.
    """
    copies = Repeated.apply(states.transpose(1, 2), tokens)
    return copies.transpose(1, 2)  # type: ignore[union-attr]


class Repeated(torch.autograd.Function):
    """`index_select` of tokens, in which a token's row of all heads is contiguous."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`states` is (1, tokens, heads, head size)."""
        ctx.save_for_backward(tokens)
        ctx.shape = states.shape
        return states.index_select(1, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), (tokens,) = grads, ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(1, tokens, grad.float()).to(grad.dtype), None
