"""Direct preference optimisation: a pair's wanted answer gains on the unwanted one."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from finetune.recipe import STRICT, Optim, Recipe

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.collate import MicroBatch
    from finetune.data.example import Example
    from finetune.data.samples import Sample
    from finetune.data.store import Rows
    from finetune.methods.losses import Loss

DEFAULTS: dict[str, Any] = {"lr": 5e-6, "warmup": 0.1}
"""Of the optimizer's section: a rate for supervised tuning breaks a model here."""
HIGH_LR = {"adapter": 1e-4, "all weights": 5e-6}
"""Learning rates above which margins grow while answers break."""


def _with_defaults(section: Any) -> Any:
    return DEFAULTS | section if isinstance(section, dict) else section


@dataclass(frozen=True, config=STRICT)
class DPO(Recipe):
    """Learn from pairs of answers which is wanted (Rafailov et al. 2023, arXiv:2305.18290)."""

    method: ClassVar[str] = "dpo"
    takes: ClassVar[Literal["text", "pairs"]] = "pairs"
    document_names: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    reads_reference: ClassVar[bool] = True
    unit: ClassVar[str] = "pairs"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected",
        "logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected", "nll_loss",
    )  # fmt: skip

    optim: Annotated[Optim, BeforeValidator(_with_defaults)] = Field(
        default_factory=lambda: Optim(**DEFAULTS)
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"] = "sigmoid"
    """What a pair adds to the loss, by TRL's names."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held to its reference; 2 to 10 for `sigmoid_norm`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose answers are assumed to be swapped (`sigmoid`, `robust`)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's mean cross-entropy, which is added to a pair's loss."""
    reference: Literal["start", "base"] = "start"
    """The model as training starts, or the base without any adapter."""

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(
                f"`label_smoothing` belongs to loss_type sigmoid and robust, not {self.loss_type}"
            )

    def advice(self) -> list[str]:
        notes: list[str] = []
        kind = "all weights" if self.adapter is None else "adapter"
        if self.optim.lr > HIGH_LR[kind]:
            notes.append(
                f"optim.lr: {self.optim.lr:g} is high for preferences ({kind}: usually at most "
                f"{HIGH_LR[kind]:g}); watch rewards/chosen, and answers of the model: margins look "
                "perfect while they break"
            )
        if self.adapter is not None and self.adapter.dropout:
            notes.append(
                "adapter.dropout: the log-probabilities of the reference are computed without it, "
                "so each reward is noisy; 0 is usual"
            )
        return notes

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.example import Example
        from finetune.data.samples import sequences_of

        return Example(tuple(chat.render(each, "assistant") for each in sequences_of(sample)))

    def count(self, batch: "MicroBatch") -> int:
        return len(batch.document_labels) // 2

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return int((rows.bounds[chosen + 1] - rows.bounds[chosen]).sum()) // 2

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Summed over pairs; the log-probability of an answer is the sum over its tokens."""
        import torch  # which a recipe must load without

        from finetune.methods.losses import Loss, sequence_logps

        logps, balance = sequence_logps(model, batch)  # (documents,)
        gains = logps - batch.columns["reference"]
        lengths = batch.document_labels.view(-1, 2)
        terms = self.pair_losses(*gains.view(-1, 2).unbind(1), *lengths.unbind(1))
        pairs = len(terms)
        nll = -logps.view(-1, 2)[:, 0] / lengths[:, 0]
        if self.sft_weight:
            terms = terms + self.sft_weight * nll
        with torch.no_grad():
            rewards = self.beta * gains.view(-1, 2).sum(0)
            won = (gains.view(-1, 2)[:, 0] > gains.view(-1, 2)[:, 1]).sum()
            sums = [
                rewards[0] - rewards[1], won, *rewards, *logps.view(-1, 2).sum(0), *lengths.sum(0),
            ]  # fmt: skip
        metrics = {name: (each, pairs) for name, each in zip(self.metrics, sums, strict=False)}
        if self.sft_weight:
            metrics["nll_loss"] = nll.detach().sum(), pairs
        return Loss(terms.sum(), metrics, balance)

    def pair_losses(
        self,
        chosen: "torch.Tensor",  # (pairs,)
        rejected: "torch.Tensor",  # (pairs,)
        chosen_tokens: "torch.Tensor",  # (pairs,)
        rejected_tokens: "torch.Tensor",  # (pairs,)
    ) -> "torch.Tensor":
        """The loss of each pair, (pairs,).

        With a and b the log-probabilities of the chosen and the rejected answer less those of the
        reference, h = a - b, e = `label_smoothing`, s the logarithm of the sigmoid:

            sigmoid        -(1 - e) s(beta h) - e s(-beta h)        arXiv:2305.18290, eq. 7
            robust         (-(1 - e) s(beta h) + e s(-beta h)) / (1 - 2 e)      arXiv:2403.00409
            hinge          max(0, 1 - beta h)                                   arXiv:2305.10425
            ipo            (a / tokens - b / tokens - 1 / (2 beta))^2           arXiv:2310.12036
            sigmoid_norm   -s(beta (a / tokens - b / tokens))

        Args:
            chosen: a.
            rejected: b.
            chosen_tokens: trained tokens of the chosen answer.
            rejected_tokens: trained tokens of the rejected answer.
        """
        from torch.nn.functional import logsigmoid, relu

        scaled, e = self.beta * (chosen - rejected), self.label_smoothing
        of_tokens = chosen / chosen_tokens - rejected / rejected_tokens
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
                return -logsigmoid(self.beta * of_tokens)
