"""Merge a plain LoRA into a weight in blocks of rows that fit into the CPU cache.

PEFT (0.21) allocates fp32 matrices for the product, the scaled product and the sum, which costs
more than the arithmetic. Here two buffers of a few rows are reused, with the same operations in the
same order.
"""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn

PIECE = 2**20
"""Elements of a piece; at least one block of rows."""

BLOCK = 64
"""Divisor of the rows of a piece, so that its matrix product takes the same code path."""


def is_plain(layer: object, adapter: str) -> bool:
    """Whether PEFT merges a layer only by adding a scaled product to a linear weight."""
    if type(layer) is not Linear or type(layer.get_base_layer()) is not nn.Linear:
        return False
    inner: Any = layer
    weight: torch.Tensor = layer.get_base_layer().weight
    if any(size % BLOCK for size in weight.shape):  # the last piece could take another code path
        return False
    special = inner.fan_in_fan_out or inner.lora_bias[adapter] or adapter in inner.lora_variant
    return not special and adapter in inner.lora_A


def add_product(
    weight: torch.Tensor, layer: Linear, adapter: str, dtype: torch.dtype
) -> torch.Tensor:
    """W + s B A, computed in fp32 and rounded once.

    Args:
        weight: (out, in), in any precision.
        layer: LoRA layer with factors in fp32.
        adapter: Name of the adapter.
        dtype: Data type of the result.
    """
    first: Any = layer.lora_A[adapter].weight.detach()  # (r, in)
    second: Any = layer.lora_B[adapter].weight.detach()  # (out, r)
    scale: float = layer.scaling[adapter]
    merged = torch.empty(weight.shape, dtype=dtype)
    pieces = list(_pieces(*weight.shape))
    product = torch.empty(pieces[0].stop, weight.shape[1])
    total = torch.empty_like(product)
    for rows in pieces:
        count = rows.stop - rows.start
        part, summed = product[:count], total[:count]
        torch.mm(second[rows], first, out=part)
        part.mul_(scale)
        summed.copy_(weight[rows])
        summed.add_(part)
        merged[rows].copy_(summed)
    return merged


def piece_rows(rows: int, columns: int) -> int:
    """Rows of a piece of a matrix, of which two buffers in fp32 are allocated."""
    return min(rows, max(1, PIECE // columns // BLOCK) * BLOCK)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    each = piece_rows(rows, columns)
    return (slice(start, min(start + each, rows)) for start in range(0, rows, each))
