"""Ring attention (arXiv:2310.01889): processes share a row and pass keys and values around.

Each process has the queries of its own tokens. Keys and values move to the next process N - 1
times, while the process computes with those that it holds; the partial results are merged in fp32
by their log-sum-exps. In the backward pass keys and values move again, and their gradients with
them, which return to their process at the end. No process ever holds all keys of a row.

    step               0   1   2   3        process 2 of 4 holds the keys of process 2, 1, 0, 3;
    keys of process    2   1   0   (3)      those of process 3 follow all of its queries
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from finetune.kernels.partial_attention import Gradients, attention, attention_backward

KEYS, GRADIENTS = 0, 1
"""Tags of messages."""


class Ring(torch.autograd.Function):
    """Causal attention within documents, for the queries of this process."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        ends: Sequence[int],
        scale: float,
    ) -> torch.Tensor:
        """Attention of the local tokens.

        Args:
            ctx: Of the operation.
            query: (1, heads, own tokens, head size).
            key: (1, key heads, own tokens, head size).
            value: Like `key`.
            group: Process group of at least two that shares the row, in the order of the tokens.
            ends: 0 and the end of each document of the row, on the host.
            scale: Factor of the scores.

        Returns:
            (1, heads, own tokens, head size), of which (1, own tokens, heads, head size) is
            contiguous.
        """
        ways, rank = dist.get_world_size(group), dist.get_rank(group)
        _, heads, tokens, size = query.shape
        parts, began, crossing = documents(ends, rank * tokens, tokens)
        own = torch.stack([key, value])
        passed = Exchange(own, group, KEYS)
        mixed = query.new_empty(1, tokens, heads, size).transpose(1, 2)
        logs = query.new_empty(1, heads, tokens, dtype=torch.float32)
        for part in parts:
            given = (each[:, :, part] for each in (query, *own))
            mixed[:, :, part], logs[:, :, part] = attention(*given, causal=True, scale=scale)
        merged, sums = mixed[:, :, :crossing].float(), logs[:, :, :crossing]
        for step in range(1, ways):
            held = passed.wait()
            if step + 1 < ways:
                passed = Exchange(held, group, KEYS)
            seen = keys_seen(began, rank - step, tokens, crossing)
            if seen is not None:
                keys, values = held[:, :, :, seen]
                more = attention(query[:, :, :crossing], keys, values, causal=False, scale=scale)
                _merge(merged, sums, *more)
                del more
        if merged.dtype != mixed.dtype:
            mixed[:, :, :crossing] = merged
        ctx.save_for_backward(query, own, mixed, logs)
        ctx.group, ctx.ends, ctx.scale = group, ends, scale
        return mixed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, own, mixed, logs = ctx.saved_tensors
        group, scale = ctx.group, ctx.scale
        ways, rank, tokens = dist.get_world_size(group), dist.get_rank(group), query.shape[2]
        parts, began, crossing = documents(ctx.ends, rank * tokens, tokens)
        passed = Exchange(own, group, KEYS)
        summed: Exchange | None = None
        of_query, of_own = torch.empty_like(query), torch.empty_like(own)
        for part in parts:
            given = (each[:, :, part] for each in (grad, query, *own, mixed, logs))
            of_query[:, :, part], of_own[0, :, :, part], of_own[1, :, :, part] = attention_backward(
                *given, causal=True, scale=scale
            )
        total: torch.Tensor = of_query[:, :, :crossing].float()
        for step in range(1, ways):
            held = passed.wait()
            if step + 1 < ways:
                passed = Exchange(held, group, KEYS)
            seen = keys_seen(began, rank - step, tokens, crossing)
            made: Gradients | None = None
            if seen is not None:
                keys, values = held[:, :, :, seen]
                made = attention_backward(
                    grad[:, :, :crossing],
                    query[:, :, :crossing],
                    keys,
                    values,
                    mixed[:, :, :crossing],
                    logs[:, :, :crossing],
                    causal=False,
                    scale=scale,
                )
            # Gradients arrive with the same keys, a step after those were sent on.
            of_held = (
                torch.zeros_like(own, dtype=torch.float32) if summed is None else summed.wait()
            )
            if made is not None:
                total += made[0]
                of_held[0, :, :, seen] += made[1]
                of_held[1, :, :, seen] += made[2]
                del made
            summed = Exchange(of_held, group, GRADIENTS)
            del of_held
        if total.dtype != of_query.dtype:
            of_query[:, :, :crossing] = total
        assert summed is not None, "a ring has at least two processes"
        of_own += summed.wait()
        return of_query, of_own[0], of_own[1], None, None, None


class Exchange:
    """Sends a tensor to the next process of a ring, and receives one from the previous process."""

    def __init__(self, tensor: torch.Tensor, group: Any, tag: int) -> None:
        ways, rank = dist.get_world_size(group), dist.get_rank(group)
        behind, before = (dist.get_global_rank(group, (rank + n) % ways) for n in (1, -1))
        self.sent: torch.Tensor | None = tensor
        self.received = torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, behind, group, tag),
                dist.P2POp(dist.irecv, self.received, before, group, tag),
            ]
        )

    def wait(self) -> torch.Tensor:
        """The received tensor."""
        for work in self.works:
            work.wait()
        self.sent = None
        return self.received


def documents(ends: Sequence[int], start: int, tokens: int) -> tuple[list[slice], int, int]:
    """The documents in a process's tokens.

    Args:
        ends: 0 and the end of each document of the row.
        start: Position of the first token of the process in the row.
        tokens: Number of tokens of the process.

    Returns:
        The local tokens of each document; the position in the row where the first of them begins;
        and how many of its tokens are local, or 0 if it begins here.
    """
    stop = start + tokens
    here = [(b, e) for b, e in itertools.pairwise(ends) if b < stop and e > start and b < e]
    began, first = here[0][0], min(here[0][1], stop) - start
    parts = [slice(max(b, start) - start, min(e, stop) - start) for b, e in here]
    return parts, began, first if began < start else 0


def keys_seen(began: int, source: int, tokens: int, crossing: int) -> slice | None:
    """The tokens of process `source` that belong to a document that began at position `began`.

    None if there are none, or if they follow (a negative `source`, counted backwards).
    """
    first = began - source * tokens
    return slice(max(first, 0), tokens) if crossing and source >= 0 and first < tokens else None


def _merge(
    mixed: torch.Tensor, logs: torch.Tensor, more: torch.Tensor, more_logs: torch.Tensor
) -> None:
    """Add attention to more keys, in place; `mixed` and `logs` are fp32."""
    share = torch.sigmoid(more_logs - logs).unsqueeze(-1)
    mixed.mul_(1 - share).addcmul_(more, share)
    logs.copy_(torch.logaddexp(logs, more_logs))
