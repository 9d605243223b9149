"""Odds-ratio preference optimisation: supervised tuning that also lowers the unwanted answers."""

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
    """Learn the chosen answers, and their odds against the rejected ones (arXiv:2403.07691)."""

    method: ClassVar[str] = "orpo"
    of_means: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*METRICS, "log_odds_ratio", "log_odds_chosen")
    high_lr: ClassVar[Mapping[str, float]] = {"adapter": 2e-4, "all weights": 2e-5}

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio beside the cross-entropy: lambda of the paper."""

    @property
    def nll_weight(self) -> float:
        """The cross-entropy of a pair is the mean over the tokens of its own chosen answer."""
        return 1.0

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """Of each pair -beta log sigmoid(log odds(chosen) - log odds(rejected)), eq. 6 and 7."""
        from torch.nn.functional import logsigmoid

        return -self.beta * logsigmoid(log_odds(answers.chosen) - log_odds(answers.rejected))

    def further_metrics(
        self, chosen: "torch.Tensor", rejected: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        from torch.nn.functional import logsigmoid

        odds = log_odds(chosen) - log_odds(rejected)
        return {"log_odds_ratio": logsigmoid(odds).sum(), "log_odds_chosen": odds.sum()}


def log_odds(mean: "torch.Tensor") -> "torch.Tensor":
    """log(p / (1 - p)) of p = exp(mean): finite where p is 1, as of an answer that is sure.

    Args:
        mean: log-probability of an answer's tokens, at most 0.
    """
    import torch

    mean = mean.clamp(max=-torch.finfo(torch.float32).eps)
    return mean - torch.log(-torch.expm1(mean))
