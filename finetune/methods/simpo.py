"""Simple preference optimization (SimPO): compare mean log-probabilities, without a reference."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import Answers, PairMethod, completed_by, optim_of
from finetune.recipe import STRICT, Optim

if TYPE_CHECKING:
    import torch

DEFAULTS: dict[str, Any] = {"lr": 1e-6, "warmup": 0.1}


@dataclass(frozen=True, config=STRICT)
class SimPO(PairMethod):
    """Prefer the chosen answer by the mean log-probability of its tokens (arXiv:2405.14734)."""

    method: ClassVar[str] = "simpo"
    of_means: ClassVar[bool] = True
    high_lr: ClassVar[Mapping[str, float]] = {"adapter": 5e-5, "all weights": 2e-6}

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    beta: Annotated[float, Field(gt=0)] = 2.0
    """Scale of the rewards, usually 2 to 10."""
    gamma: Annotated[float, Field(ge=0)] = 1.0
    """Target margin between the rewards, usually 0.3 to 0.5 of `beta`."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's mean cross-entropy in a pair's loss, as in CPO-SimPO."""

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """`-log sigmoid(beta (chosen - rejected) - gamma)` of each pair, eq. 6."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * (answers.chosen - answers.rejected) - self.gamma)
