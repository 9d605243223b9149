"""REINFORCE leave-one-out (RLOO): the baseline is the mean reward of a prompt's other samples."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.online import (
    ADVANTAGE,
    MEAN_RATIO,
    OLD,
    Online,
    clip_ratios,
    group_means,
    importance_weights,
    sums_of_completions,
)
from finetune.recipe import STRICT, Text

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from finetune.data.rows.collate import MicroBatch
    from finetune.methods.losses import Loss


@dataclass(frozen=True, config=STRICT)
class RLOO(Online):
    """Compare a completion with the others of its prompt (Ahmadian et al. 2024, 2402.14740)."""

    method: ClassVar[str] = "rloo"
    metrics: ClassVar[tuple[str, ...]] = (
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        MEAN_RATIO,
    )  # fmt: skip

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """Clipping range around 1 of a completion's policy ratio."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Factor of log(policy / reference), subtracted from the reward; 0 needs no reference."""
    reference: Text = "start"
    """Reference of `beta`: the policy's `start`, the `base` without adapter, or a model name."""

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def penalty(self) -> float:
        return self.beta

    def advantages(self, rewards: "np.ndarray") -> "np.ndarray":
        import numpy as np

        scored = np.isfinite(rewards)
        numbers = scored.sum(axis=1, keepdims=True)
        less = (rewards - group_means(rewards)) * numbers / np.maximum(numbers - 1, 1)
        return np.where(scored, less, 0.0)

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over completions of -min(r A, clip(r) A), with r the ratio of a completion.

        If vLLM sampled it, a term is multiplied by the mean importance weight of its tokens.
        """
        import torch

        from finetune.methods.losses import Loss, token_logps

        logps, balance = token_logps(model, batch)  # (tokens,)
        old = batch.token_columns.get(OLD, logps.detach())
        weights = batch.columns[ADVANTAGE]  # (completions,)
        ratio = sums_of_completions(logps - old, batch.document_labels).exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        terms = -torch.minimum(ratio * weights, clipped * weights)
        largest = self.vllm_importance_sampling_clip_max
        importance, ratios, extremes = importance_weights(old, batch, largest)
        if importance is not None:
            lengths = batch.document_labels
            terms = terms * sums_of_completions(importance, lengths) / lengths.clamp(min=1)
        below = (ratio < 1 - self.epsilon) & (weights < 0)
        above = (ratio > 1 + self.epsilon) & (weights > 0)
        return Loss(terms.sum(), clip_ratios(below, above) | ratios, balance, extremes)
