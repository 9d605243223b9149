"""Uniform noise on embeddings in training (NEFTune), a function of seed, step, document and place.

It does not depend on the device, on packing or padding, or on how a step is divided.
"""

from typing import Any

import torch
from torch import nn

from finetune.data.rows.embedding_noise import Noise
from finetune.kernels.philox import philox

AT_ONCE = 2**22
"""Random words that are in memory at a time."""


def with_noise(hidden: torch.Tensor, noise: Noise) -> torch.Tensor:
    """Embeddings (micro_rows, tokens, width), each with noise in [-1, 1] x alpha / sqrt(length
    x width) (Jain et al. 2023, arXiv:2310.05914, algorithm 1)."""
    width, blocks = hidden.shape[-1], torch.arange(-(-hidden.shape[-1] // 4)).to(hidden.device)
    parts = list[torch.Tensor]()
    for tokens in noise.tokens.flatten(1).split(max(1, AT_ONCE // width), 1):
        document, place, length = tokens[..., None]
        counters = (blocks[None], place, document, torch.zeros_like(place))
        words = torch.cat(philox(counters, noise.key), 1)[:, :width]
        scale = (length > 0) * noise.alpha / (length.clamp(min=1) * width).sqrt()
        uniform = words.double().add_(0.5).mul_(2.0**-31).sub_(1.0)
        parts.append(uniform.mul_(scale).float())
    return (hidden.float() + torch.cat(parts).view(hidden.shape)).to(hidden.dtype)


def add_noise(table: nn.Module) -> None:
    """Add `Noise.current` to what an embedding returns in training."""

    def add(table: nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor:
        noise = Noise.current
        return hidden if noise is None or not table.training else with_noise(hidden, noise)

    table.register_forward_hook(add)
