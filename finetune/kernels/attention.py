"""Attention of short documents as matrix products, for CPUs that compute in 16 bits.

    S = Q K^T / sqrt(d) + causal mask      P = softmax(S)      O = P V

PyTorch's fused kernel never holds P, which costs it most where P is small: its backward pass in
bf16 is what these products save. P is computed again in the backward pass here, so that no more is
kept than the fused kernel keeps.
"""

import functools
import itertools
from typing import Any

import torch

from finetune.kernels import native
from finetune.kernels.chains import chain

LONGEST = 384
"""Tokens of the longest document that is computed so: `python -m benchmarks kernels` times it."""


def serves(query: torch.Tensor) -> bool:
    """Whether the products are faster for short documents where `query` is."""
    return query.device.type == "cpu" and query.dtype != torch.float32


class ShortAttention(torch.autograd.Function):
    """Causal attention of documents side by side; each key head is shared by a group of heads.

    With D the gradient of O and dP = D V^T:  dS = P (dP - rowsum(dP P)),  dQ = dS K, dK = dS^T Q,
    dV = P^T D, where dQ and dK carry the scale. The heads of a group lie token by token, so that
    each product is one matrix per key head; what a document takes and gives is copied by itself,
    in the caches of the CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: list[int],
        scale: float,
    ) -> torch.Tensor:
        """`query` (1, heads, tokens, head size), `ends` as `cu_seq_lens`; returns as `query`."""
        ctx.save_for_backward(query, key, value)
        ctx.ends, ctx.scale = ends, scale
        result = _like(query)
        groups = query.shape[1] // key.shape[1]
        for start, end in itertools.pairwise(ends):
            part = slice(start, end)
            stacked, keys = _stacked(query, part, groups), _stacked(key, part, 1)
            mixed = _weights(stacked, keys, groups, scale) @ _stacked(value, part, 1)
            _put(result, part, mixed, groups)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = _like(query), _like(key), _like(value)
        for start, end in itertools.pairwise(ctx.ends):
            part = slice(start, end)
            stacked, given = (_stacked(each, part, groups) for each in (query, grad))
            keys, values = (_stacked(each, part, 1) for each in (key, value))
            weights = _weights(stacked, keys, groups, ctx.scale)
            _put(of_value, part, weights.transpose(1, 2) @ given, 1)
            of_weights = given @ values.transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data.out(
                of_weights, weights, -1, weights.dtype, grad_input=of_weights
            )
            _put(of_query, part, (of_scores @ keys).mul_(ctx.scale), groups)
            _put(of_key, part, (of_scores.transpose(1, 2) @ stacked).mul_(ctx.scale), 1)
        return of_query, of_key, of_value, None, None


def _like(heads: torch.Tensor) -> torch.Tensor:
    """Room for (1, heads, tokens, head size), token by token as projections are."""
    rows = heads.transpose(1, 2)
    return torch.empty_like(rows, memory_format=torch.contiguous_format).transpose(1, 2)


def _stacked(heads: torch.Tensor, part: slice, groups: int) -> torch.Tensor:
    """Heads of a document as one matrix per key head.  # (key heads, length x groups, size)"""
    rows = heads[0, :, part].unflatten(0, (-1, groups))  # (key heads, groups, length, size)
    return rows.transpose(1, 2).flatten(1, 2).contiguous()


def _put(heads: torch.Tensor, part: slice, stacked: torch.Tensor, groups: int) -> None:
    """The reverse of `_stacked`, into a place of (1, heads, tokens, head size)."""
    rows = stacked.unflatten(1, (-1, groups)).transpose(1, 2)
    heads[0, :, part].unflatten(0, (-1, groups)).copy_(rows)


def _weights(query: torch.Tensor, key: torch.Tensor, groups: int, scale: float) -> torch.Tensor:
    """softmax(scale Q K^T + mask), 0 after a token.  # (key heads, length x groups, length)"""
    return causal_shares(query @ key.transpose(1, 2), groups, scale)


@chain(native.causal_shares)
def causal_shares(scores: torch.Tensor, groups: int, scale: float) -> torch.Tensor:
    """In place: pages that are new to the process cost more than what is computed in them."""
    seen = _mask(scores.dtype, groups)[: scores.shape[1], : scores.shape[2]]
    torch.add(seen, scores, alpha=scale, out=scores)
    return torch.softmax(scores, -1, out=scores)


@functools.cache
def _mask(dtype: torch.dtype, groups: int) -> torch.Tensor:
    """0 where a token sees another, else -inf.  # (LONGEST x groups, LONGEST)"""
    mask = torch.full((LONGEST, LONGEST), -torch.inf, dtype=dtype).triu(1)
    return mask.repeat_interleave(groups, 0)
