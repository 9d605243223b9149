"""Attention of some queries to some keys, with the log-sum-exp of each row.

Results over different keys can be merged, and so can gradients: with the final output O and
log-sum-exp L of a row, each part of the keys has the probabilities P = exp(S - L), and its
gradients follow from P, O and the gradient of O (FlashAttention, arXiv:2205.14135, appendix B).

PyTorch's own kernels: flash attention on CPUs and, in 16 bits from Ampere on, on GPUs; elsewhere on
GPUs the memory-efficient kernel, whose keys are repeated for all heads. On GPUs the head size must
be a multiple of 8.
"""

import torch
import torch.nn.functional as F

AMPERE = (8, 0)
"""Minimum compute capability of the flash kernel for GPUs."""
ALIGNED_ROWS = 32
"""The memory-efficient kernel pads log-sum-exps to a multiple of this."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of query, key and value."""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp.

    Args:
        query: (1, heads, queries, head size).
        key: (1, key heads, keys, head size); each is shared by heads / key heads queries.
        value: Like `key`.
        causal: Query i sees keys 0 to i, instead of all keys.
        scale: Factor of the scores.

    Returns:
        Like `query`, and fp32 (1, heads, queries).
    """
    given = query, key, value
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(*given, 0.0, causal, scale=scale)
    if _has_flash(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        return fused(*given, 0.0, causal, False, scale=scale)[:2]
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed, logs = fused(query, keys, values, None, True, 0.0, causal, scale=scale)[:2]
    return mixed, logs[:, :, : query.shape[2]]


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    logs: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    """The part of the gradients that comes from these keys.

    Args:
        grad: Gradient of `mixed`.
        query: As for `attention`.
        key: As for `attention`.
        value: As for `attention`.
        mixed: Attention of these queries to all their keys; like `query`.
        logs: Its log-sum-exp; fp32 (1, heads, queries).
        causal: As for `attention`.
        scale: As for `attention`.

    Returns:
        Gradients like `query`, `key` and `value`.
    """
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return fused(grad, query, key, value, mixed, logs, 0.0, causal, scale=scale)
    if _has_flash(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_backward
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused without dropout
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        return fused(
            grad, query, key, value, mixed, logs.contiguous(), None, None, query.shape[2],
            key.shape[2], 0.0, causal, seed, unused, scale=scale,
        )  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    padded = F.pad(logs, (0, -query.shape[2] % ALIGNED_ROWS), value=torch.inf)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    of_query, *of_keys, _ = fused(
        grad, query, keys, values, None, mixed, padded, seed, seed, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    of_key, of_value = (each.unflatten(1, (-1, groups)).sum(dim=2) for each in of_keys)
    return of_query, of_key, of_value


def _has_flash(query: torch.Tensor) -> bool:
    if query.dtype == torch.float32 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(query.device) >= AMPERE
