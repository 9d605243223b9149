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
    """What the noise of a micro-batch depends on."""

    current: ClassVar["Noise | None"] = None
    """Noise of the micro-batch that is trained, like the seed of torch's generator."""

    alpha: float
    key: tuple[int, int]
    """Seed and step."""
    tokens: torch.Tensor  # (3, micro_rows, tokens) int64
    """Each token's document, its place there, and the document's length, which is 0 for padding."""

    def padded(self, by: tuple[int, ...]) -> "Noise":
        """With tokens of no noise, as `torch.nn.functional.pad` counts them."""
        return dataclasses.replace(self, tokens=F.pad(self.tokens, by))

    def part(self, tokens: slice) -> "Noise":
        """That of some tokens of each row."""
        return dataclasses.replace(self, tokens=self.tokens[..., tokens])

    def added(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings (micro_rows, tokens, width), each with noise in [-1, 1] x alpha / sqrt(length
        x width) (Jain et al. 2023, arXiv:2310.05914, algorithm 1)."""
        width, blocks = hidden.shape[-1], torch.arange(-(-hidden.shape[-1] // 4)).to(hidden.device)
        parts = list[torch.Tensor]()
        for tokens in self.tokens.flatten(1).split(max(1, AT_ONCE // width), 1):
            document, place, length = tokens[..., None]
            counters = (blocks[None], place, document, torch.zeros_like(place))
            words = torch.cat(philox(counters, self.key), 1)[:, :width]
            scale = (length > 0) * self.alpha / (length.clamp(min=1) * width).sqrt()
            uniform = words.double().add_(0.5).mul_(2.0**-31).sub_(1.0)
            parts.append(uniform.mul_(scale).float())
        return (hidden.float() + torch.cat(parts).view(hidden.shape)).to(hidden.dtype)


def add_noise(table: nn.Module) -> None:
    """Add `Noise.current` to what an embedding returns in training."""

    def add(table: nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor:
        noise = Noise.current
        return hidden if noise is None or not table.training else noise.added(hidden)

    table.register_forward_hook(add)
