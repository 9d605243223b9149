"""Direct preference optimization (DPO): raise the chosen answer of a pair over the rejected one."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import Answers, PairMethod, completed_by, optim_of
from finetune.recipe import STRICT, Optim, Text

if TYPE_CHECKING:
    import torch

    from finetune.data.samples import Preference

DEFAULTS: dict[str, Any] = {"lr": 5e-6, "warmup": 0.1}


@dataclass(frozen=True, config=STRICT)
class DPO(PairMethod):
    """Learn which answer of a pair is preferred (Rafailov et al. 2023, arXiv:2305.18290)."""

    method: ClassVar[str] = "dpo"
    reads_reference: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("margin",)
    encoding_fields: ClassVar[tuple[str, ...] | None] = ("margin",)

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"] = "sigmoid"
    """Loss of a pair; names as in TRL."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is kept close to its reference; 2 to 10 for `sigmoid_norm`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped answers (`sigmoid`, `robust`)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's mean cross-entropy in a pair's loss."""
    margin: bool = False
    """Subtract the column `margin` of a row from its difference of rewards."""
    reference: Text = "start"
    """`start`: the model at the start of training; `base`: without any adapter; or a model name."""

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(
                f"`label_smoothing` belongs to loss_type sigmoid and robust, not {self.loss_type}"
            )
        if self.margin and self.loss_type == "ipo":
            raise ValueError("`margin` belongs to every loss_type but ipo, which has its own")

    def margin_of(self, sample: "Preference") -> float:
        return sample.margin if self.margin else 0.0

    @property
    def nll_weight(self) -> float:
        return self.sft_weight

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """The loss of each pair, (pairs,).

        With a and b the log-probabilities of the chosen and the rejected answer minus those of the
        reference, h = a - b - margin / beta, e = `label_smoothing`, s the log-sigmoid:

            sigmoid        -(1 - e) s(beta h) - e s(-beta h)        arXiv:2305.18290, eq. 7
            robust         (-(1 - e) s(beta h) + e s(-beta h)) / (1 - 2 e)      arXiv:2403.00409
            hinge          max(0, 1 - beta h)                                   arXiv:2305.10425
            ipo            (a / tokens - b / tokens - 1 / (2 beta))^2           arXiv:2310.12036
            sigmoid_norm   -s(beta (a / tokens - b / tokens) - margin)
        """
        from torch.nn.functional import logsigmoid, relu

        chosen, rejected, margin = answers.chosen, answers.rejected, answers.margin
        scaled, e = self.beta * (chosen - rejected) - margin, self.label_smoothing
        of_tokens = chosen / answers.chosen_tokens - rejected / answers.rejected_tokens
        match self.loss_type:
            case "sigmoid":
                return -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)
            case "robust":
                held = (1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)
                return -held / (1 - 2 * e)
            case "hinge":
                return relu(1 - scaled)
            case "ipo":
                return (of_tokens - 1 / (2 * self.beta)) ** 2
            case "sigmoid_norm":
                return -logsigmoid(self.beta * of_tokens - margin)
