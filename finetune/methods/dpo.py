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
PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair",
    "sppo_hard", "apo_zero", "apo_down", "sft",
]  # fmt: skip
SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""Losses that read `label_smoothing`."""
WITH_MARGIN = ("sigmoid", "robust", "hinge", "sigmoid_norm", "exo_pair", "sft")
"""Losses of the difference of rewards, from which a margin can be subtracted, and that of none."""


@dataclass(frozen=True, config=STRICT)
class DPO(PairMethod):
    """Learn which answer of a pair is preferred (Rafailov et al. 2023, arXiv:2305.18290)."""

    method: ClassVar[str] = "dpo"
    reads_reference: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("margin",)
    encoding_fields: ClassVar[tuple[str, ...] | None] = ("margin",)

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    loss_type: PairLoss | tuple[PairLoss, ...] = "sigmoid"
    """Loss of a pair, or several that are added, as in MPO; names as in TRL."""
    loss_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Weight of each of several losses; empty for 1."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the tokens of an answer beyond the length of the other (LD-DPO, 2409.06411)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is kept close to its reference; 2 to 10 for `sigmoid_norm`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped answers (`sigmoid`, `robust`, `exo_pair`)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's mean cross-entropy in a pair's loss."""
    margin: bool = False
    """Subtract the column `margin` of a row from its difference of rewards."""
    reference: Text = "start"
    """`start`: the model at the start of training; `base`: without any adapter; or a model name."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.losses]
        named = ", ".join(names)
        if self.label_smoothing and not set(SMOOTHED) & set(names):
            raise ValueError(
                f"`label_smoothing` belongs to loss_type {', '.join(SMOOTHED)}, not {named}"
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError("`label_smoothing`: exo_pair needs it, such as 0.01")
        others = [name for name in names if name not in WITH_MARGIN]
        if self.margin and others:
            raise ValueError(f"`margin` belongs to loss_type {', '.join(WITH_MARGIN)}; got {named}")
        if self.loss_weights and len(self.loss_weights) != len(names):
            raise ValueError(
                f"`loss_weights`: {len(self.loss_weights)} weights for the losses {named}"
            )
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"`loss_type`: expected different losses, got '{named}'")

    @property
    def losses(self) -> list[tuple[PairLoss, float]]:
        """The losses of a pair with their weights."""
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        return list(zip(names, self.loss_weights or (1.0,) * len(names), strict=False))

    @property
    def tail_weight(self) -> float:
        return self.ld_alpha

    def margin_of(self, sample: "Preference") -> float:
        return sample.margin if self.margin else 0.0

    @property
    def nll_weight(self) -> float:
        return self.sft_weight + dict(self.losses).get("sft", 0.0)

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """The weighted sum of the losses of each pair, (pairs,).

        With a and b the log-probabilities of the chosen and the rejected answer minus those of the
        reference, h = a - b - margin / beta, e = `label_smoothing`, S the sigmoid, s its logarithm:

            sigmoid        -(1 - e) s(beta h) - e s(-beta h)        arXiv:2305.18290, eq. 7
            robust         (-(1 - e) s(beta h) + e s(-beta h)) / (1 - 2 e)      arXiv:2403.00409
            hinge          max(0, 1 - beta h)                                   arXiv:2305.10425
            ipo            (a / tokens - b / tokens - 1 / (2 beta))^2           arXiv:2310.12036
            sigmoid_norm   -s(beta (a / tokens - b / tokens) - margin)
            exo_pair       KL of [S(beta h), S(-beta h)] from [1 - e, e]        arXiv:2402.00856
            nca_pair       -s(beta a) - s(-beta a) / 2 - s(-beta b) / 2         arXiv:2402.05369
            bco_pair       -s(beta a) - s(-beta b)                              arXiv:2404.04656
            sppo_hard      (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2          arXiv:2405.00675
            apo_zero       1 - S(beta a) + S(beta b)                            arXiv:2408.06266
            apo_down       S(beta a) + 1 - S(beta (a - b))                      arXiv:2408.06266
            sft            the cross-entropy of `sft_weight`
        """
        terms = [
            weight * self._pair_loss(name, answers) for name, weight in self.losses if name != "sft"
        ]
        return sum(terms[1:], terms[0]) if terms else 0.0 * answers.chosen

    def _pair_loss(self, name: PairLoss, answers: Answers) -> "torch.Tensor":
        import math

        from torch.nn.functional import logsigmoid, relu

        chosen, rejected, margin = answers.chosen, answers.rejected, answers.margin
        scaled, e = self.beta * (chosen - rejected) - margin, self.label_smoothing
        a, b = self.beta * chosen, self.beta * rejected
        of_tokens = chosen / answers.chosen_tokens - rejected / answers.rejected_tokens
        match name:
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
            case "exo_pair":
                right = scaled.sigmoid() * (logsigmoid(scaled) - math.log1p(-e))
                return right + (-scaled).sigmoid() * (logsigmoid(-scaled) - math.log(e))
            case "nca_pair":
                return -logsigmoid(a) - (logsigmoid(-a) + logsigmoid(-b)) / 2
            case "bco_pair":
                return -logsigmoid(a) - logsigmoid(-b)
            case "sppo_hard":
                return (chosen - 0.5 / self.beta) ** 2 + (rejected + 0.5 / self.beta) ** 2
            case "apo_zero":
                return (-a).sigmoid() + b.sigmoid()
            case "apo_down":
                return a.sigmoid() + (b - a).sigmoid()
            case "sft":
                raise AssertionError("`nll_weight` adds it")
