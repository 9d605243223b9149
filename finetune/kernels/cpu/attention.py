"""Attention of concatenated documents on CPUs in 16 bits, in tiles or by matrix products.

    S = Q K^T / sqrt(d) + causal mask      P = softmax(S)      O = P V

If code is compiled and the CPU multiplies bf16, all of it is a single pass (`tiled_attention`).
Otherwise the forward pass is PyTorch's fused kernel, which never stores P. Its bf16 backward pass
is slower than the matrix products here, which recompute P for one block of queries at a time. They
need less memory than the fused kernel: the inputs, and one number per query.
"""

import functools
import itertools
import math
from typing import Any

import torch

from finetune.kernels.cpu import tiled_attention
from finetune.kernels.cpu.tiled_attention import TiledAttention, like
from finetune.kernels.pointwise import Chain, chain
from finetune.planner.kernels import SCORE_BLOCK, score_block


def serves(query: torch.Tensor) -> bool:
    """Whether this is faster for `query`, as timed by `python -m benchmarks kernels`."""
    return query.device.type == "cpu" and query.dtype != torch.float32


def by_products(dtype: torch.dtype, compiling: bool) -> bool:
    """Whether attention of documents in `dtype` is computed by matrix products on this CPU."""
    tiled = compiling and dtype == torch.bfloat16 and tiled_attention.reason_against() is None
    return dtype != torch.float32 and not tiled


def longest_served(query: torch.Tensor, longest: int, window: int | None, cap: float | None) -> int:
    """Maximum document length that `attention_of_documents` supports, at most `longest`."""
    if _tiled(query):
        return longest
    if cap is not None or not serves(query):
        return 0
    return longest if window is None else min(window, longest)


def _tiled(query: torch.Tensor) -> bool:
    return Chain.compiling and tiled_attention.serves(query)


def attention_of_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: list[int],
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of concatenated documents, by the fastest implementation for `query`.

    No document may be longer than `longest_served`.

    Args:
        query: (1, heads, tokens, head size).
        key: (1, key heads, tokens, head size); each is shared by heads / key heads queries.
        value: Like `key`.
        ends: 0, and the end of each document.
        scale: Factor of the scores.
        window: Number of tokens that a token sees, including itself; None for all.
        cap: Scores s become cap * tanh(s / cap); None for no cap.

    Returns:
        Like `query`.
    """
    if _tiled(query):
        return TiledAttention.apply(query, key, value, ends, scale, window, cap)
    return DocumentAttention.apply(query, key, value, ends, scale)


class DocumentAttention(torch.autograd.Function):
    """Causal attention of concatenated documents; each key head is shared by a group of heads.

    With D the gradient of O and dP = D V^T:  dS = P (dP - rowsum(dP P)),  dQ = dS K,  dK = dS^T Q,
    dV = P^T D, with the scale in dQ and dK. The heads of a group are interleaved by token, so each
    product is one matrix per key head. The fused kernel returns the logarithm of each row's sum of
    e^S, so the backward pass does not need the row maximum.
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
        """`query` (1, heads, tokens, head size), `ends` like `cu_seq_lens`; result like `query`."""
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, logs = like(query), query.new_empty(query.shape[1:3], dtype=torch.float32)
        for start, end in itertools.pairwise(ends):
            part = slice(start, end)
            given = (each[:, :, part] for each in (query, key, value))
            result[:, :, part], logs[:, part] = fused(*given, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, logs)
        ctx.ends, ctx.scale = ends, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, logs = ctx.saved_tensors
        of_query, of_key, of_value = like(query), like(key), like(value)
        groups = query.shape[1] // key.shape[1]
        lengths = [end - start for start, end in itertools.pairwise(ctx.ends)]
        rooms = query.new_empty(
            2,
            query.shape[1]
            * max(length * score_block(query.shape[1], length) for length in lengths),
        )
        for start, end in itertools.pairwise(ctx.ends):
            whole = slice(start, end)
            keys, values = (_stacked(each, whole, 1) for each in (key, value))
            turned = _turned(keys), _turned(values)
            totals = [torch.zeros_like(each, dtype=torch.float32) for each in turned]
            size = score_block(query.shape[1], end - start)
            for first in range(start, end, size):
                part = slice(first, min(first + size, end))
                seen = part.stop - start
                stacked, given = (_stacked(each, part, groups) for each in (query, grad))
                rows = _stacked(logs[None, :, :, None], part, groups)
                shares, of_scores = share_gradients(
                    _product(stacked, turned[0][:, :, :seen], rooms[0]),
                    _product(given, turned[1][:, :, :seen], rooms[1]),
                    rows, groups, ctx.scale,
                )  # fmt: skip
                _put(of_query, part, (of_scores @ keys[:, :seen]).mul_(ctx.scale), groups)
                totals[0][:, :, :seen] += _turned(stacked) @ of_scores
                totals[1][:, :, :seen] += _turned(given) @ shares
            _put(of_key, whole, totals[0].mul_(ctx.scale).transpose(1, 2), 1)
            _put(of_value, whole, totals[1].transpose(1, 2), 1)
        return of_query, of_key, of_value, None, None


def _stacked(heads: torch.Tensor, part: slice, groups: int) -> torch.Tensor:
    """Heads of a slice as one matrix per key head.  # (key heads, length x groups, size)"""
    rows = heads[0, :, part].unflatten(0, (-1, groups))  # (key heads, groups, length, size)
    return rows.transpose(1, 2).flatten(1, 2).contiguous()


def _put(heads: torch.Tensor, part: slice, stacked: torch.Tensor, groups: int) -> None:
    """The reverse of `_stacked`, written into a slice of (1, heads, tokens, head size)."""
    rows = stacked.unflatten(1, (-1, groups)).transpose(1, 2)
    heads[0, :, part].unflatten(0, (-1, groups)).copy_(rows)


def _turned(matrices: torch.Tensor) -> torch.Tensor:
    """Transpose in memory, which makes products faster."""
    return matrices.transpose(1, 2).contiguous()


def _product(first: torch.Tensor, second: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """first @ second, written to existing memory, because new pages are slower."""
    shape = (*first.shape[:2], second.shape[2])
    return torch.bmm(first, second, out=room[: math.prod(shape)].view(shape))


@chain
def share_gradients(
    scores: torch.Tensor, grads: torch.Tensor, logs: torch.Tensor, groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute P and dS from S and dP, in place; the queries are the last tokens of the keys.

    Args:
        scores: S without scale and mask.  # (key heads, queries x groups, keys)
        grads: dP, like `scores`.
        logs: log rowsum e^S, for the compiled chain.  # (key heads, queries x groups, 1) float32
        groups: Query heads per key head.
        scale: Factor of the scores.
    """
    rows, own = scores.shape[1], scores.shape[1] // groups
    scores.mul_(scale)[:, :, -own:].add_(_mask(scores.dtype, groups)[:rows, :own])
    shares = torch.softmax(scores, -1, out=scores)
    return shares, torch.ops.aten._softmax_backward_data.out(
        grads, shares, -1, shares.dtype, grad_input=grads
    )


def release() -> None:
    """Free memory that is kept between backward passes."""
    _mask.cache_clear()


@functools.cache
def _mask(dtype: torch.dtype, groups: int) -> torch.Tensor:
    """Causal mask of a block: 0 or -inf.  # (SCORE_BLOCK x groups, SCORE_BLOCK)"""
    mask = torch.full((SCORE_BLOCK, SCORE_BLOCK), -torch.inf, dtype=dtype).triu(1)
    return mask.repeat_interleave(groups, 0)
