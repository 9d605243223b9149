"""Odds-ratio preference optimization (ORPO): an SFT loss that also penalizes rejected answers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import METRICS, Answers, PairMethod, completed_by, optim_of
from finetune.recipe import STRICT, Optim

if TYPE_CHECKING:
    import torch

DEFAULTS: dict[str, Any] = {"lr": 8e-6, "warmup": 0.1}


@dataclass(frozen=True, config=STRICT)
class ORPO(PairMethod):
    """Learn the chosen answers, and their odds over the rejected ones (arXiv:2403.07691)."""

    method: ClassVar[str] = "orpo"
    of_means: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*METRICS, "log_odds_ratio", "log_odds_chosen")
    high_lr: ClassVar[Mapping[str, float]] = {"adapter": 2e-4, "all weights": 2e-5}

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds-ratio term relative to the cross-entropy: lambda in the paper."""

    @property
    def nll_weight(self) -> float:
        """1: the cross-entropy is the mean over the tokens of the chosen answer of a pair."""
        return 1.0

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """`-beta log sigmoid(log odds(chosen) - log odds(rejected))` per pair, eq. 6 and 7."""
        from torch.nn.functional import logsigmoid

        return -self.beta * logsigmoid(log_odds(answers.chosen) - log_odds(answers.rejected))

    def further_metrics(
        self, chosen: "torch.Tensor", rejected: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        from torch.nn.functional import logsigmoid

        odds = log_odds(chosen) - log_odds(rejected)
        return {"log_odds_ratio": logsigmoid(odds).sum(), "log_odds_chosen": odds.sum()}


def log_odds(mean: "torch.Tensor") -> "torch.Tensor":
    """log(p / (1 - p)) with p = exp(mean); finite even if p rounds to 1.

    Args:
        mean: Mean log-probability of an answer's tokens, at most 0.
    """
    import torch

    mean = mean.clamp(max=-torch.finfo(torch.float32).eps)
    return mean - torch.log(-torch.expm1(mean))
