"""Losses as sums over terms: the loop divides once, by the terms of the whole global batch."""

import dataclasses
from collections.abc import Mapping

import torch

from finetune.data.collate import UNTRAINED, MicroBatch
from finetune.kernels.divergence import Target

Sum = tuple[torch.Tensor, int | torch.Tensor]
"""A sum, as a scalar, and how many numbers were added, a scalar where only the device knows."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a method computes from a micro-batch."""

    sum: torch.Tensor  # scalar, fp32
    """Over the terms of the micro-batch."""
    metrics: Mapping[str, Sum] = dataclasses.field(default_factory=dict[str, Sum])
    """By the names in the method's `metrics`; those that are left out count nothing."""
    balance: torch.Tensor | None = None  # scalar, fp32
    """The load-balancing loss of experts, summed over tokens; None where none is trained."""
    extremes: Mapping[str, torch.Tensor] = dataclasses.field(
        default_factory=dict[str, torch.Tensor]
    )
    """Largest and smallest values, scalars, by the names in the method's `extremes`."""


def token_loss(model: torch.nn.Module, batch: MicroBatch) -> Loss:
    """The cross-entropy, summed over the trained tokens of a micro-batch."""
    sums = token_loss_sum(model, batch)
    return Loss(sums) if sums.dim() == 0 else Loss(sums[0], balance=sums[1])


def token_loss_sum(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum of the cross-entropy over the trained tokens of a micro-batch, a scalar in fp32.

    In training with a load-balancing loss it is (2,): the cross-entropy and `Balance.sum`.

    `model` is one that `finetune.kernels.head.give_loss` was applied to, however it is wrapped.
    """
    places, targets = labelled(batch)
    return model(
        **batch.inputs(),
        use_cache=False,
        places=places,
        targets=targets,
        real_tokens=batch.real_tokens,
    )


def token_logps(
    model: torch.nn.Module, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each trained token, (trained_tokens,) in fp32, and `Loss.balance`.

    In the order of the batch. Logits are never whole in memory: the backward pass computes each
    chunk of them again. `model` as of `token_loss_sum`.
    """
    places, targets = labelled(batch)
    found = model(
        **batch.inputs(),
        use_cache=False,
        places=places,
        targets=targets,
        real_tokens=batch.real_tokens,
        logps=True,
    )
    if len(found) == batch.trained_tokens:
        return found, None
    return found[:-1], found[-1]


def sequence_logps(
    model: torch.nn.Module, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of the trained tokens of each document, (documents,), and `Loss.balance`.

    In the order of the batch's documents, in fp64: differences of two sums of a thousand nats are
    compared to a hundredth, and fp32 resolves a ten-thousandth of one.
    """
    logps, balance = token_logps(model, batch)
    logps = logps.double()
    if not batch.rows:  # torch 2.13 reduces no empty tensor
        return logps, balance
    lengths = batch.document_labels
    # Without its checks, for which a GPU would have to be asked.
    return torch.segment_reduce(logps, "sum", lengths=lengths, unsafe=True), balance


def taught_loss_sum(
    model: torch.nn.Module, batch: MicroBatch, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the trained tokens, scalars in fp32: the loss of a student, its cross-entropy.

    `model` is one that `finetune.kernels.divergence.give_teacher` was applied to, however it is
    wrapped. Logits are never whole in memory.
    """
    places, targets = labelled(batch)
    given = batch.inputs() | {"places": places, "targets": targets, "taught": target}
    total, nll = model(**given, use_cache=False).unbind()
    return total, nll


def sequence_scores(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Scores at the last token of each document, (documents, labels) in fp32.

    `model` is one that `finetune.kernels.scores.give_scores` was applied to, however it is wrapped.
    """
    return model(**batch.inputs(), use_cache=False, places=batch.last_places)


def labelled(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat places (trained_tokens,) of the rows that a loss is computed from, and their targets.

    `batch.labels` (micro_rows, longest) is aligned with `batch.ids`; the token at t is predicted
    from the place t - 1, so the first label of a row is never used. Where documents lie side by
    side, the first label of each is none, so that no document is predicted from another.
    """
    length = batch.ids.shape[1]  # of a part of a row, whose last label is the next part's first
    trained = batch.labels[:, 1:] != UNTRAINED  # (micro_rows, longest - 1)
    # The number is known, so that no accelerator has to be asked for it.
    row, column = torch.nonzero_static(trained, size=batch.trained_tokens).unbind(1)
    return row * length + column, batch.labels[row, column + 1]
