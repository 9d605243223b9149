"""Kahneman-Tversky optimization (KTO): learn from unpaired answers, each labeled good or bad."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import (
    DocumentMethod,
    completed_by,
    optim_of,
    preference_advice,
    token_mean,
)
from finetune.recipe import STRICT, Kind, Optim, Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.samples import Sample
    from finetune.methods.losses import Loss
    from finetune.training.passes import StepPasses

DEFAULTS: dict[str, Any] = {"lr": 1e-6, "warmup": 0.1}
HIGH_LR = {"adapter": 1e-4, "all weights": 5e-6}
FEWEST_ROWS = 16
"""Rows per step below which the estimate of the KL is mostly noise."""


@dataclass(frozen=True, config=STRICT)
class KTO(DocumentMethod):
    """Learn from answers that are labeled as wanted or unwanted (arXiv:2402.01306)."""

    method: ClassVar[str] = "kto"
    takes: ClassVar[Kind] = "judged"
    columns: ClassVar[tuple[str, ...]] = ("wanted",)
    reads_reference: ClassVar[bool] = True
    passes_before_step: ClassVar[int] = 1
    unit: ClassVar[str] = "answers"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = (
        "kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
        "lengths/chosen", "lengths/rejected", "logits/chosen", "logits/rejected", "token_loss",
        "entropy",
    )  # fmt: skip

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is kept close to its reference."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of a wanted answer."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of an unwanted answer."""
    reference: Text = "start"
    """`start`: the model at the start of training; `base`: without any adapter; or a model name."""

    def __post_init__(self) -> None:
        if self.batch.rows < 2:
            raise ValueError(
                "`batch.rows`: a step of one answer has no other prompt to compare it with; use "
                f"at least 2, and {FEWEST_ROWS} or more to learn well"
            )

    def advice(self) -> list[str]:
        notes = preference_advice(self, HIGH_LR)
        if self.batch.rows < FEWEST_ROWS and not self.batch.packing:
            notes.append(
                f"batch.rows: {self.batch.rows} answers a step give a noisy estimate of the KL; "
                f"use {FEWEST_ROWS} or more"
            )
        return notes

    def data_advice(self, counts: Mapping[str, Any]) -> list[str]:
        """Advice on the weights: eq. 8 recommends a ratio of wanted to unwanted of 1 to 4/3."""
        wanted = counts["wanted"]
        unwanted = counts["documents"] - wanted
        if not wanted or not unwanted:
            return []
        ratio = self.desirable_weight * wanted / (self.undesirable_weight * unwanted)
        if 1 <= ratio <= 4 / 3:
            return []
        low, high = (self.undesirable_weight * unwanted / wanted * each for each in (1, 4 / 3))
        most = self.desirable_weight * wanted / unwanted
        return [
            f"desirable_weight: {wanted:,} wanted and {unwanted:,} unwanted answers weigh "
            f"{ratio:.2f} to 1, and 1 to 1.33 is usual: set desirable_weight to {low:.2f} up to "
            f"{high:.2f}, or undesirable_weight to {0.75 * most:.2f} up to {most:.2f}"
        ]

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        """Train the complete answer if the prompt is a separate field, otherwise the last turn."""
        from finetune.data.rows.example import Example
        from finetune.data.samples import Conversation, Judged

        assert isinstance(sample, Judged)
        answer = sample.answer
        last = isinstance(answer, Conversation) and not answer.given
        row = chat.render(answer, "completion" if last else "assistant")
        return Example((row,), {"wanted": float(sample.wanted)})

    def before_step(self, passes: "StepPasses") -> float:
        """The KL of the step in nats, estimated from answers to the prompts of other rows."""
        summed, answers = passes.mismatched_logps()
        return (summed - passes.reference) / answers if answers else 0.0

    def reference_of_step(self, passes: "StepPasses") -> float:
        return passes.mismatched_logps()[0]

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over answers, eq. 7 and 8.

        With r the log-probability of an answer minus that of the reference, and z the KL of the
        step (`before_step`, clamped at 0, no gradient): weight x (1 - sigmoid(beta (r - z))) for
        a wanted answer, weight x (1 - sigmoid(beta (z - r))) for an unwanted one.
        """
        import torch

        from finetune.methods.losses import Loss, sequence_values

        logps, _, logits, entropies, balance = sequence_values(model, batch)  # (documents,)
        gains, kl = logps - batch.columns["reference"], max(0.0, batch.of_step)
        wanted = batch.columns["wanted"] > 0
        margins = torch.where(wanted, gains - kl, kl - gains)
        weights = torch.where(wanted, self.desirable_weight, self.undesirable_weight)
        terms = weights * torch.sigmoid(-self.beta * margins)
        with torch.no_grad():
            measured = self.beta * gains, logps, batch.document_labels
            sides = ("chosen", wanted), ("rejected", ~wanted)
            metrics = {
                f"{name}/{side}": ((values * chosen).sum(), chosen.sum())
                for name, values in zip(("rewards", "logps", "lengths"), measured, strict=True)
                for side, chosen in sides
            }
            for side, chosen in sides:
                of_side = logits.where(chosen, math.nan)
                metrics[f"logits/{side}"] = token_mean(of_side, batch.document_labels)
            metrics["entropy"] = token_mean(entropies, batch.document_labels)
            metrics["token_loss"] = -logps.sum(), batch.trained_tokens
            metrics["kl"] = torch.full_like(terms, kl).sum(), len(terms)
        return Loss(terms.sum().float(), metrics, balance)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """The reward margin of a step that has both wanted and unwanted answers."""
        both = [means.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        return {} if None in both else {"rewards/margins": both[0] - both[1]}  # type: ignore[operator]
