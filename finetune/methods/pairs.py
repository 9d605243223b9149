"""Methods that learn from pairs of answers: one forward pass of both, and a loss of each pair."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field

from finetune.recipe import Kind, Optim, Recipe

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.collate import MicroBatch
    from finetune.data.example import Example
    from finetune.data.samples import Preference, Sample
    from finetune.data.store import Rows
    from finetune.methods.losses import Loss

METRICS = (
    "rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected",
    "logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected", "pairs/tied",
    "nll_loss", "token_loss",
)  # fmt: skip
"""By TRL's names; `pairs/tied`; and the mean cross-entropy over the tokens of both answers."""
TIED = 1e-4
"""Nats by which two answers differ at most that are tied: what fp32 resolves of long ones."""


class Answers(NamedTuple):
    """The answers of some pairs, as their losses are computed from them."""

    chosen: "torch.Tensor"  # (pairs,)
    """Log-probability of the chosen answer (a mean where a method is `of_means`), less that of the
    reference where the method has one."""
    rejected: "torch.Tensor"  # (pairs,)
    """The same of the rejected answer."""
    chosen_tokens: "torch.Tensor"  # (pairs,)
    """Trained tokens of the chosen answer."""
    rejected_tokens: "torch.Tensor"  # (pairs,)
    """Trained tokens of the rejected answer."""
    margin: "torch.Tensor | float" = 0.0  # (pairs,)
    """What the data says that the difference of rewards is to exceed."""


def completed_by(defaults: Mapping[str, Any]) -> BeforeValidator:
    """Completes a given `optim` section with a method's own learning rate and warmup.

    A rate for supervised tuning breaks a model that learns preferences.
    """

    def complete(section: Any) -> Any:
        return {**defaults, **section} if isinstance(section, dict) else section

    return BeforeValidator(complete)


def optim_of(defaults: Mapping[str, Any]) -> Any:
    """A field with the `optim` section of a method's own defaults."""
    return Field(default_factory=lambda: Optim(**defaults))


def preference_advice(recipe: Recipe, high_lr: Mapping[str, float]) -> list[str]:
    """What is risky in the settings of a method that learns preferences.

    Args:
        recipe: of any method.
        high_lr: learning rates of an `adapter` and of `all weights` above which answers break.
    """
    notes: list[str] = []
    kind = "all weights" if recipe.adapter is None else "adapter"
    if recipe.optim.lr > high_lr[kind]:
        notes.append(
            f"optim.lr: {recipe.optim.lr:g} is high for preferences ({kind}: usually at most "
            f"{high_lr[kind]:g}); watch rewards/chosen, and answers of the model: margins look "
            "perfect while they break"
        )
    if recipe.reads_reference and recipe.adapter is not None and recipe.adapter.dropout:
        notes.append(
            "adapter.dropout: the log-probabilities of the reference are computed without it, "
            "so each reward is noisy; 0 is usual"
        )
    return notes


class PairMethod(Recipe):
    """A method whose loss is a sum over pairs of a chosen and a rejected answer."""

    takes: ClassVar[Kind] = "pairs"
    document_names: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    unit: ClassVar[str] = "pairs"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = METRICS
    high_lr: ClassVar[Mapping[str, float]] = {"adapter": 1e-4, "all weights": 5e-6}
    """Learning rates above which margins grow while answers break."""
    of_means: ClassVar[bool] = False
    """Whether answers are compared by their mean log-probability of a token, not by the sum."""

    beta: float

    @property
    def nll_weight(self) -> float:
        """Weight of the chosen answer's mean cross-entropy in the loss of a pair."""
        return 0.0

    def advice(self) -> list[str]:
        return preference_advice(self, self.high_lr)

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.example import Example
        from finetune.data.samples import Preference, sequences_of

        assert isinstance(sample, Preference)
        sequences = tuple(chat.render(each, "assistant") for each in sequences_of(sample))
        margin = {"margin": self.margin_of(sample)} if "margin" in self.columns else {}
        return Example(sequences, margin)

    def margin_of(self, sample: "Preference") -> float:
        """What the difference of a pair's rewards is to exceed, where `columns` has `margin`."""
        return sample.margin

    def count(self, batch: "MicroBatch") -> int:
        return len(batch.document_labels) // 2

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return int((rows.bounds[chosen + 1] - rows.bounds[chosen]).sum()) // 2

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Summed over pairs; the log-probability of an answer is the sum over its tokens."""
        import torch  # which a recipe must load without

        from finetune.methods.losses import Loss, sequence_logps

        logps, balance = sequence_logps(model, batch)  # (documents,)
        lengths = batch.document_labels.view(-1, 2)
        nll, whole = -logps.view(-1, 2)[:, 0] / lengths[:, 0], logps
        if self.of_means:
            logps = logps / batch.document_labels
        compared = logps - batch.columns["reference"] if self.reads_reference else logps
        margin = batch.columns["margin"][::2] if "margin" in self.columns else 0.0
        sides = (*compared.view(-1, 2).unbind(1), *lengths.unbind(1))
        terms = self.pair_losses(Answers(*sides, margin))
        if self.nll_weight:
            terms = terms + self.nll_weight * nll
        with torch.no_grad():
            chosen, rejected = compared.view(-1, 2).unbind(1)
            rewards = self.beta * compared.view(-1, 2).sum(0)
            tied = (chosen - rejected).abs() <= TIED
            sums = [
                rewards[0] - rewards[1], (chosen > rejected).sum(), *rewards,
                *logps.view(-1, 2).sum(0), *lengths.sum(0), tied.sum(),
            ]  # fmt: skip
            metrics = dict(zip(METRICS, sums, strict=False))
            metrics |= {"nll_loss": nll.sum()} if self.nll_weight else {}
            metrics |= self.further_metrics(chosen, rejected)
        counted = {name: (each, len(terms)) for name, each in metrics.items()}
        counted["token_loss"] = -whole.detach().sum(), batch.trained_tokens
        return Loss(terms.sum().float(), counted, balance)

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """The loss of each pair, (pairs,), without the cross-entropy of `nll_weight`."""
        raise NotImplementedError

    def further_metrics(
        self, chosen: "torch.Tensor", rejected: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        """Sums over pairs of what this method measures besides `METRICS`."""
        return {}
