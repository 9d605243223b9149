"""Contrastive preference optimization (CPO): DPO without a reference, plus an SFT loss."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import Answers, PairMethod, completed_by, optim_of
from finetune.recipe import STRICT, Optim

if TYPE_CHECKING:
    import torch

DEFAULTS: dict[str, Any] = {"lr": 1e-6, "warmup": 0.1}


@dataclass(frozen=True, config=STRICT)
class CPO(PairMethod):
    """Prefer the chosen answer by its log-probability, with an SFT loss (arXiv:2401.08417)."""

    method: ClassVar[str] = "cpo"

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Scale of the rewards."""
    sft_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the chosen answer's mean cross-entropy in a pair's loss."""

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """`-log sigmoid(beta (chosen - rejected))` per pair, eq. 3; sums favor short answers."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * (answers.chosen - answers.rejected))
