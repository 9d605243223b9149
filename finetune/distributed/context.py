"""Context parallelism: processes share the tokens of a row and exchange keys and values.

Each process computes the queries of its own tokens against the keys and values of all preceding
tokens. By default it gathers them, as in Llama 3 (arXiv:2407.21783, section 3.3.2), and the
backward pass reduce-scatters their gradients; `distributed.ring` passes them around instead.
Unlike in Ulysses, the number of heads need not be divisible by the number of processes.

    tokens    a b c d | e f g h    the second process has e to h: e sees a to e, f sees a to f, ...
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from finetune.backend.axes import Rotation
from finetune.distributed.ring import Ring
from finetune.errors import FinetuneError

NAMES: dict[Rotation, str] = {"allgather": "gathered_keys", "alltoall": "ring"}
"""Names of the attention implementations in transformers."""


class Gathered(torch.autograd.Function):
    """All-gather along the first dimension, with a reduce-scatter in the backward pass."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        ways = torch.distributed.get_world_size(group)
        whole = part.new_empty(ways * part.shape[0], *part.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ways = torch.distributed.get_world_size(ctx.group)
        part = grad.new_empty(grad.shape[0] // ways, *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None


def register(group: Any, rotation: Rotation) -> str:
    """Register an attention that exchanges keys and values in transformers; returns its name.

    Args:
        group: Process group that shares a row, in the order of the tokens.
        rotation: How they are exchanged.
    """
    rank = torch.distributed.get_rank(group)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        document_ends: Sequence[int] | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """`packed_attention.attend` for the local tokens; (1, own tokens, heads, head size).

        Raises:
            FinetuneError: the model did not pass on the document boundaries.
        """
        if document_ends is None or attention_mask is not None:
            raise FinetuneError(
                f"batch.padding_free: {type(module).__name__} does not pass on document "
                "boundaries; use a backend that does not split rows"
            )
        if rotation == "alltoall":
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            given = (each.to(value.dtype) for each in (query, key))
            return Ring.apply(*given, value, group, document_ends, scale).transpose(1, 2), None
        both = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3)  # (tokens, 1, key heads, sizes)
        whole = Gathered.apply(both.to(value.dtype), group).permute(1, 2, 0, 3)
        keys, values = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
        start = rank * query.shape[2]
        mixed = attention_of_part(
            query.to(value.dtype), keys, values, start, document_ends, scaling
        )
        return mixed.transpose(1, 2), None

    AttentionInterface.register(NAMES[rotation], attend)
    return NAMES[rotation]


def attention_of_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    ends: Sequence[int],
    scaling: float | None = None,
) -> torch.Tensor:
    """Causal attention within documents, for the queries from `start` on.

    Args:
        query: (1, heads, own tokens, head size).
        key: (1, key heads, tokens, head size).
        value: as `key`.
        start: Position of the first query among the tokens.
        ends: 0 and the end of each document, on the host; the last is the number of tokens.
        scaling: Factor of the scores; by default 1 / sqrt(head size).

    Returns:
        (1, heads, own tokens, head size).
    """
    stop = start + query.shape[2]
    parts: list[torch.Tensor] = []
    for begin, end in itertools.pairwise(ends):
        first, last = max(begin, start), min(end, stop)
        if first >= last:
            continue
        queries, seen = query[:, :, first - start : last - start], slice(begin, last)
        # If a document began on another process, align the causal mask at the last query and key.
        mask = None if first == begin else _lower_right(last - first, last - begin, query.device)
        parts.append(
            F.scaled_dot_product_attention(
                queries,
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _lower_right(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Causal mask of the last `queries` of `keys` tokens; on a GPU it is not materialized."""
    if device.type == "cuda":
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
