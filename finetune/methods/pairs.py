"""Base of methods that learn from pairs of answers: one forward pass for both, a loss per pair."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field

from finetune.recipe import Kind, Optim, Recipe

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.rows.store import Rows
    from finetune.data.samples import Preference, Sample
    from finetune.methods.losses import Loss, Sum

METRICS = (
    "rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected",
    "logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected", "pairs/tied",
    "nll_loss", "token_loss", "logits/chosen", "logits/rejected", "entropy",
)  # fmt: skip
"""Metrics as in TRL, plus `pairs/tied` and `token_loss`, the mean over tokens of both answers.

Tied pairs do not count as accurate, so `rewards/accuracies` is 0 at the reference.
"""
TIED = 1e-4
"""Nats by which tied answers differ at most: the resolution of fp32 for long answers."""


class Answers(NamedTuple):
    """Log-probabilities and lengths of the answers of pairs, from which losses are computed."""

    chosen: "torch.Tensor"  # (pairs,)
    """Log-probability of the chosen answer (mean over tokens if the method is `of_means`), minus
    that of the reference if the method has one."""
    rejected: "torch.Tensor"  # (pairs,)
    """The same for the rejected answer."""
    chosen_tokens: "torch.Tensor"  # (pairs,)
    """Trained tokens of the chosen answer."""
    rejected_tokens: "torch.Tensor"  # (pairs,)
    """Trained tokens of the rejected answer."""
    margin: "torch.Tensor | float" = 0.0  # (pairs,)
    """Margin from the data that the difference of rewards should exceed."""


def completed_by(defaults: Mapping[str, Any]) -> BeforeValidator:
    """Complete a user's `optim` section with the method's default learning rate and warmup.

    A learning rate for SFT breaks a model that learns preferences.
    """

    def complete(section: Any) -> Any:
        return {**defaults, **section} if isinstance(section, dict) else section

    return BeforeValidator(complete)


def optim_of(defaults: Mapping[str, Any]) -> Any:
    """A field whose default is an `optim` section with the method's defaults."""
    return Field(default_factory=lambda: Optim(**defaults))


def token_mean(values: "torch.Tensor", lengths: "torch.Tensor") -> "Sum":
    """A mean over the tokens of some answers, as a sum and a count.

    Args:
        values: (answers,), summed over the tokens of each; NaN for an answer that does not count.
        lengths: (answers,), the number of tokens of each.
    """
    known = values.isfinite()
    return values.where(known, 0.0).sum(), (lengths * known).sum()


def preference_advice(recipe: Recipe, high_lr: Mapping[str, float]) -> list[str]:
    """Warnings about risky settings of a preference method.

    Args:
        recipe: Recipe of any method.
        high_lr: Learning rates above which answers break, for `adapter` and `all weights`.
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


class DocumentMethod(Recipe):
    """A method whose loss is a sum over documents, or over pairs if `document_names` has two."""

    def count(self, batch: "MicroBatch") -> int:
        documents = batch.last_places if self.head.scored else batch.document_labels
        return len(documents) // self.documents_per_row

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        documents = rows.bounds[chosen + 1] - rows.bounds[chosen]
        return int(documents.sum()) // self.documents_per_row


class PairMethod(DocumentMethod):
    """A method whose loss is a sum over pairs of a chosen and a rejected answer."""

    takes: ClassVar[Kind] = "pairs"
    document_names: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    unit: ClassVar[str] = "pairs"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = METRICS
    high_lr: ClassVar[Mapping[str, float]] = {"adapter": 1e-4, "all weights": 5e-6}
    """Learning rates above which margins grow while answers break."""
    of_means: ClassVar[bool] = False
    """Whether answers are compared by the mean log-probability of their tokens, not the sum."""

    beta: float

    @property
    def nll_weight(self) -> float:
        """Weight of the chosen answer's mean cross-entropy in a pair's loss."""
        return getattr(self, "sft_weight", 0.0)

    def advice(self) -> list[str]:
        return preference_advice(self, self.high_lr)

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.rows.example import Example
        from finetune.data.samples import Preference, sequences_of

        assert isinstance(sample, Preference)
        sequences = tuple(chat.render(each, "assistant") for each in sequences_of(sample))
        margin = {"margin": self.margin_of(sample)} if "margin" in self.columns else {}
        return Example(sequences, margin)

    def margin_of(self, sample: "Preference") -> float:
        """Margin that the difference of rewards should exceed, if `columns` has `margin`."""
        return sample.margin

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over pairs; the log-probability of an answer is the sum over its tokens."""
        import torch  # imported here: recipes must load without torch

        from finetune.methods.losses import Loss, sequence_values

        # (documents,) each
        whole, logps, logits, entropies, balance = sequence_values(model, batch, self.tail_weight)
        lengths = batch.document_labels.view(-1, 2)
        nll = -whole.view(-1, 2)[:, 0] / lengths[:, 0]
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
            right = (chosen > rejected) & ~tied
            sums = [
                rewards[0] - rewards[1], right.sum(), *rewards,
                *logps.view(-1, 2).sum(0), *lengths.sum(0), tied.sum(),
            ]  # fmt: skip
            metrics = dict(zip(METRICS, sums, strict=False))
            metrics |= {"nll_loss": nll.sum()} if self.nll_weight else {}
            metrics |= self.further_metrics(chosen, rejected)
        counted = {name: (each, len(terms)) for name, each in metrics.items()}
        counted["token_loss"] = -whole.detach().sum(), batch.trained_tokens
        for number, side in enumerate(("chosen", "rejected")):
            counted[f"logits/{side}"] = token_mean(logits[number::2], lengths[:, number])
        counted["entropy"] = token_mean(entropies, batch.document_labels)
        return Loss(terms.sum().float(), counted, balance)

    def pair_losses(self, answers: Answers) -> "torch.Tensor":
        """The loss of each pair, (pairs,), without the cross-entropy of `nll_weight`."""
        raise NotImplementedError

    def further_metrics(
        self, chosen: "torch.Tensor", rejected: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        """Sums over pairs of this method's metrics in addition to `METRICS`."""
        return {}
