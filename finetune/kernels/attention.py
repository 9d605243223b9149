"""Attention of one short document as matrix products, for CPUs that compute in 16 bits.

    S = Q K^T / sqrt(d) + causal mask      P = softmax(S)      O = P V

PyTorch's fused kernel never holds P, which costs it most where P is small: its backward pass in
bf16 is what these products save. P is computed again in the backward pass here, so that no more is
kept than the fused kernel keeps.
"""

import functools
from typing import Any

import torch

LONGEST = 384
"""Tokens of the longest document that is computed so: `python -m benchmarks kernels` times it."""


def serves(query: torch.Tensor) -> bool:
    """Whether the products are faster for a document, query (1, heads, tokens, head size)."""
    return query.device.type == "cpu" and query.dtype != torch.float32 and query.shape[2] <= LONGEST


class ShortAttention(torch.autograd.Function):
    """Causal attention of a document; each key head is shared by a group of query heads.

    With D the gradient of O and dP = D V^T:  dS = P (dP - rowsum(dP P)),  dQ = dS K, dK = dS^T Q,
    dV = P^T D, where dQ and dK carry the scale. Groups lie below one another, so that each product
    is one matrix per key head.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        heads, length, size = query.shape[1:]
        stacked = query.reshape(key.shape[1], -1, size)  # (key heads, group x length, head size)
        keys, values = key[0].contiguous(), value[0].contiguous()
        ctx.save_for_backward(stacked, keys, values)
        ctx.scale = scale
        return (_weights(stacked, keys, scale) @ values).view(1, heads, length, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        weights = _weights(query, key, ctx.scale)  # (key heads, group x length, length)
        stacked = grad.reshape(query.shape)
        of_value = weights.transpose(1, 2) @ stacked
        of_weights = stacked @ value.transpose(1, 2)
        of_scores = torch.ops.aten._softmax_backward_data.out(
            of_weights, weights, -1, weights.dtype, grad_input=of_weights
        )
        of_query = (of_scores @ key).mul_(ctx.scale)
        of_key = (of_scores.transpose(1, 2) @ query).mul_(ctx.scale)
        return of_query.view(grad.shape), of_key[None], of_value[None], None


def _weights(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale Q K^T + mask), 0 above the diagonal.  # (key heads, group x length, length)"""
    length = key.shape[1]
    scores = query @ key.transpose(1, 2)
    each = scores.unflatten(1, (-1, length))  # a view
    # In place: pages that are new to the process cost more here than what is computed in them.
    torch.add(_mask(scores.dtype)[:length, :length], each, alpha=scale, out=each)
    return torch.softmax(scores, -1, out=scores)


@functools.cache
def _mask(dtype: torch.dtype) -> torch.Tensor:
    """0 where a token sees another, else -inf.  # (LONGEST, LONGEST)"""
    return torch.full((LONGEST, LONGEST), -torch.inf, dtype=dtype).triu(1)
