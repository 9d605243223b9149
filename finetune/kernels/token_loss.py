"""Losses of a token other than its cross-entropy: smoothed labels, and weights without gradient."""

import dataclasses
import math
from typing import Literal

import torch
import torch.nn.functional as F

TOP = 20
"""Largest logits whose entropy weights a token (arXiv:2601.02151, section 4)."""


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """How the cross-entropy of a token becomes its loss in training."""

    smoothing: float = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""
    weight: Literal["none", "dft", "eaft"] = "none"
    """Factor: 1, the target's probability, or the entropy of the `TOP` likeliest tokens over its
    maximum."""
    power: float = 1.0
    """Exponent of that entropy."""

    @torch.no_grad()
    def by_entropy(
        self, logits: torch.Tensor, bias: torch.Tensor | None, scale: float, cap: float | None
    ) -> torch.Tensor | None:
        """Weights (rows,) in fp32 by logits (rows, vocabulary) before bias, scale and cap, if any.

        They select the same tokens as the logits after scale and cap, which are increasing.
        """
        if self.weight != "eaft":
            return None
        given = logits if bias is None else logits + bias
        likely = given.topk(min(TOP, given.shape[1]), -1).values.float() * scale
        likely = likely if cap is None else (likely / cap).tanh() * cap
        logs = likely.log_softmax(-1)
        entropies = -(logs.exp() * logs).sum(-1) / math.log(likely.shape[1])
        return entropies.clamp_(min=0).pow_(self.power)

    def by_loss(self, losses: torch.Tensor) -> torch.Tensor | None:
        """Weights by the cross-entropies, if any: the probabilities (arXiv:2508.05629, eq. 8)."""
        return (-losses.detach()).exp() if self.weight == "dft" else None

    def summed(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The summed loss of all logits (labelled, vocabulary) in fp32."""
        if self.weight == "none":
            return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)
        losses = F.cross_entropy(logits, targets, reduction="none")
        weights = self.by_entropy(logits.detach(), None, 1.0, None)
        return (losses * (self.by_loss(losses) if weights is None else weights)).sum()
