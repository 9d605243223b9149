"""Group relative policy optimization (GRPO), with the losses of DAPO, Dr. GRPO, GSPO and CISPO."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.online import (
    ADVANTAGE,
    MEAN_RATIO,
    OLD,
    REFERENCE,
    Online,
    clip_ratios,
    group_means,
    group_stds,
    importance_weights,
    sums_of_completions,
)
from finetune.recipe import STRICT, Text

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.store import Rows
    from finetune.methods.losses import Loss, Sum

RANGES = {
    "grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4),
    "cispo": (0.2, 5.0),
}  # fmt: skip
"""Clipping ranges of each loss, below and above 1; for CISPO the second is the largest ratio."""
PER_TOKEN = ("dapo", "cispo")
"""Losses whose terms are tokens; the terms of other losses are completions."""
STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, config=STRICT)
class GRPO(Online):
    """Compare the completions of each prompt by their rewards (Shao et al. 2024, 2402.03300)."""

    method: ClassVar[str] = "grpo"
    metrics: ClassVar[tuple[str, ...]] = (
        "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        MEAN_RATIO,
    )  # fmt: skip

    loss_type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """Loss of a completion, and the divisor of the sum; names as in TRL."""
    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Clipping range of the policy ratio below 1; null for the default: 0.2, GSPO 3e-4."""
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    """Clipping range above 1: 0.2, DAPO 0.28, GSPO 4e-4; for CISPO the largest ratio, 5."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of their group, of the sampled batch, or not."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    max_resample_times: Annotated[int, Field(ge=0)] = 0
    """Times to sample other prompts in place of those whose completions got equal rewards, as in
    DAPO; 0 keeps them."""
    use_bias_correction_kl: bool = False
    """Multiply the KL term by the policy ratio, as TRL does by default."""
    reference: Text = "start"
    """Reference of `beta`: the policy's `start`, the `base` without adapter, or a model name."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy of each token's distribution, which is subtracted from its loss."""

    def __post_init__(self) -> None:
        if self.use_bias_correction_kl and not self.beta:
            raise ValueError("`use_bias_correction_kl` belongs to beta > 0")

    @property
    def resamplings(self) -> int:
        return self.max_resample_times

    @property
    def clipping(self) -> tuple[float, float]:
        """Clipping ranges below and above 1; for CISPO the second is the largest ratio."""
        low, high = RANGES[self.loss_type]
        return self.epsilon or low, self.epsilon_high or high

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def always_active(self) -> bool:
        return self.beta > 0 or self.entropy_coef > 0

    def count(self, batch: "MicroBatch") -> int:
        return batch.trained_tokens if self.loss_type in PER_TOKEN else batch.rows

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        per_token = self.loss_type in PER_TOKEN
        return int(rows.labelled[chosen].sum()) if per_token else len(chosen)

    def ratios(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return len(chosen) if self.loss_type == "gspo" else int(rows.labelled[chosen].sum())

    def advantages(self, rewards: "np.ndarray") -> "np.ndarray":
        import numpy as np

        less = rewards - group_means(rewards)
        if self.scale_rewards == "group":
            less = less / (group_stds(rewards) + STD_EPSILON)
        elif self.scale_rewards == "batch":
            less = less / (group_stds(rewards.reshape(1, -1)) + STD_EPSILON)
        return np.where(np.isfinite(rewards), less, 0.0)

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over tokens (DAPO, CISPO) or completions."""
        from finetune.methods.losses import Loss, token_logps

        wanted = self.entropy_coef > 0
        logps, balance = token_logps(model, batch, statistics=wanted)  # (tokens,)
        logps, _, entropies = logps.view(3, -1) if wanted else (logps, None, None)
        old = batch.token_columns.get(OLD, logps.detach())
        reference = batch.token_columns.get(REFERENCE)
        largest = self.vllm_importance_sampling_clip_max
        importance, ratios, extremes = importance_weights(old, batch, largest)
        of_documents = batch.columns[ADVANTAGE], batch.document_labels
        terms, metrics = self.completion_losses(
            logps, old, *of_documents, reference, importance, entropies
        )
        return Loss(terms.sum(), metrics | ratios, balance, extremes)

    def completion_losses(
        self,
        logps: "torch.Tensor",  # (tokens,) fp32
        old: "torch.Tensor",  # (tokens,)
        advantages: "torch.Tensor",  # (completions,)
        lengths: "torch.Tensor",  # (completions,) int64
        reference: "torch.Tensor | None" = None,  # (tokens,)
        importance: "torch.Tensor | None" = None,  # (tokens,)
        entropies: "torch.Tensor | None" = None,  # (tokens,) without gradient
    ) -> "tuple[torch.Tensor, dict[str, Sum]]":
        """The loss of each completion, (completions,), and the metrics.

        With r = exp(logp - old) of a token, A the advantage, E the upper clipping range and
        N = `max_completion_length`; min(...) is the minimum of r A and clip(r) A; means and sums
        are over the tokens of a completion:

            grpo      mean of -min(...)                                         arXiv:2402.03300
            dapo      sum of -min(...)                                          arXiv:2503.14476
            dr_grpo   sum of -min(...) / N                                      arXiv:2503.20783
            gspo      -min(...), r = exp(mean of logp - old)                    arXiv:2507.18071
            cispo     sum of -min(r, E) A logp, without gradient of r           arXiv:2506.13585

        times `importance` of the token, or its mean over the completion for GSPO,
        plus `beta` times exp(d) - d - 1, d = reference - logp, minus `entropy_coef` times the
        entropy H, summed or averaged in the same way. As the gradient of H is the expectation of
        -(logp + H) grad(logp), that of the sampled token times r and `importance` estimates it.
        """
        import torch

        low, high = self.clipping
        numbers = lengths.clamp(min=1)
        apart = logps - old
        if self.loss_type == "gspo":
            apart, weights = sums_of_completions(apart, lengths) / numbers, advantages
        else:
            weights = advantages.repeat_interleave(lengths, output_size=len(logps))
        ratio = apart.exp()
        if self.loss_type == "cispo":
            terms, above = -ratio.clamp(max=high).detach() * weights * logps, ratio > high
        else:
            clipped = ratio.clamp(1 - low, 1 + high)
            terms, above = -torch.minimum(ratio * weights, clipped * weights), ratio > 1 + high
        if importance is not None:
            is_one = self.loss_type == "gspo"
            terms = terms * (
                sums_of_completions(importance, lengths) / numbers if is_one else importance
            )
        below = (ratio < 1 - low) & (weights < 0)
        metrics = clip_ratios(below, above & (weights > 0))
        extra = torch.zeros_like(logps)
        if reference is not None:
            d = reference - logps
            spread = d.exp() - d - 1
            if self.use_bias_correction_kl:
                spread = spread * (logps - old).exp()
            metrics["kl"] = spread.detach().sum(), len(spread)
            extra = self.beta * spread
        if entropies is not None:
            start = logps.detach()
            weight = (start - old).exp() * (1.0 if importance is None else importance)
            moved = weight * (start + entropies) * (logps - start)
            extra = extra - self.entropy_coef * (entropies - moved)
        if self.loss_type == "gspo":
            return terms + sums_of_completions(extra, lengths) / numbers, metrics
        sums = sums_of_completions(terms + extra, lengths)
        divisors = {"grpo": numbers, "dr_grpo": self.max_completion_length}
        return sums / divisors.get(self.loss_type, 1), metrics
