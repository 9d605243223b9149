"""Uniform noise on embeddings in training (NEFTune), a function of seed, step, document and place.

It does not depend on the device, on packing or padding, or on how a step is divided.
"""

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from finetune.kernels.philox import philox

AT_ONCE = 2**22
"""Random words that are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """Where the tokens of a micro-batch are in the data; all tensors are (micro_rows, tokens)."""

    current: ClassVar["Noise | None"] = None
    """Noise of the micro-batch that is trained, like the seed of torch's generator."""

    key: tuple[int, int]
    """Seed and step."""
    documents: torch.Tensor  # int64
    """Number of each token's document."""
    places: torch.Tensor  # int64
    """Place of each token in its document."""
    scales: torch.Tensor  # fp32
    """alpha / sqrt(tokens of the document); 0 for padding."""

    def _each(self, change: Any) -> "Noise":
        tensors = (change(each) for each in (self.documents, self.places, self.scales))
        return Noise(self.key, *tensors)

    def padded(self, by: tuple[int, ...]) -> "Noise":
        """With tokens of no noise, as `torch.nn.functional.pad` counts them."""
        return self._each(lambda each: F.pad(each, by))

    def part(self, tokens: slice) -> "Noise":
        """That of some tokens of each row."""
        return self._each(lambda each: each[:, tokens])

    def added(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings (micro_rows, tokens, width) with noise in [-1, 1] x scale / sqrt(width).

        Jain et al. 2023, arXiv:2310.05914, algorithm 1.
        """
        width, device = hidden.shape[-1], hidden.device
        blocks = torch.arange(-(-width // 4), device=device)
        found = torch.empty(self.places.numel(), width, dtype=torch.float32, device=device)
        tokens = max(1, AT_ONCE // width)
        parts = (each.flatten().split(tokens) for each in (self.documents, self.places))
        for rows, documents, places in zip(found.split(tokens), *parts, strict=True):
            counters = (blocks[None], places[:, None], documents[:, None], blocks.new_zeros(1, 1))
            words = torch.cat(philox(counters, self.key), 1)[:, :width]
            rows.copy_(words.double().add_(0.5).mul_(2.0**-31).sub_(1.0))
        found *= self.scales.flatten()[:, None] / width**0.5
        return (hidden.float() + found.view(hidden.shape)).to(hidden.dtype)


def _add(table: nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor:
    noise = Noise.current
    return hidden if noise is None or not table.training else noise.added(hidden)


def add_noise(table: nn.Module) -> None:
    """Add `Noise.current` to what an embedding returns in training."""
    table.register_forward_hook(_add)
