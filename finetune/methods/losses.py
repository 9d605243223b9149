"""Losses as sums over terms: the loop divides once, by the number of terms in the global batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from finetune.data.rows.collate import UNTRAINED, MicroBatch
from finetune.errors import FinetuneError
from finetune.kernels.divergence import Target

Sum = tuple[torch.Tensor, int | torch.Tensor]
"""A scalar sum and the number of summands: an int, or a scalar tensor if it is on the device."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """Loss and metrics of a micro-batch."""

    sum: torch.Tensor  # scalar, fp32
    """Sum over the terms of the micro-batch."""
    metrics: Mapping[str, Sum] = dataclasses.field(default_factory=dict[str, Sum])
    """Sums by the names in the method's `metrics`; missing names count as no summands."""
    balance: torch.Tensor | None = None  # scalar, fp32
    """Load-balancing loss of experts, summed over tokens; None if it is not trained."""
    extremes: Mapping[str, torch.Tensor] = dataclasses.field(
        default_factory=dict[str, torch.Tensor]
    )
    """Minima and maxima as scalars, by the names in the method's `extremes`."""


def token_loss(model: torch.nn.Module, batch: MicroBatch) -> Loss:
    """Cross-entropy, summed over the trained tokens of a micro-batch."""
    sums = token_loss_sum(model, batch)
    return Loss(sums) if sums.dim() == 0 else Loss(sums[0], balance=sums[1])


def token_loss_sum(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Cross-entropy, summed over the trained tokens of a micro-batch: a scalar in fp32.

    With a load-balancing loss in training, the result is (2,): cross-entropy and `Balance.sum`.

    `finetune.kernels.head.give_loss` must have been applied to `model`, which may be wrapped.
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
    model: torch.nn.Module, batch: MicroBatch, statistics: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each trained token, (trained_tokens,) in fp32, and `Loss.balance`.

    Tokens are in the order of the batch. With `statistics`, mean logits and entropies follow, both
    without gradient, (3 * trained_tokens,). Logits are computed in chunks, which the backward pass
    recomputes. For `model` see `token_loss_sum`.

    Raises:
        FinetuneError: no process has all tokens of a document (`MicroBatch.divided`).
    """
    if batch.divided is not None:
        raise FinetuneError(
            "method: its loss reads the log-probability of each token of a document, and no "
            "process has all tokens of one under this backend; use fsdp_full_shard"
        )
    return _token_values(model, batch, statistics)


def _token_values(
    model: torch.nn.Module, batch: MicroBatch, statistics: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_logps`; with `statistics`, mean logits and entropies follow: (3 * trained_tokens,)."""
    places, targets = labelled(batch)
    found = model(
        **batch.inputs(),
        use_cache=False,
        places=places,
        targets=targets,
        real_tokens=batch.real_tokens,
        logps=True,
        statistics=statistics,
    )
    values = batch.trained_tokens * (1 + 2 * statistics)
    assert len(found) in (values, values + 1)
    return (found, None) if len(found) == values else (found[:-1], found[-1])


def sequence_logps(
    model: torch.nn.Module, batch: MicroBatch, tail: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of the trained tokens of each document, (documents,), and `Loss.balance`.

    Documents are in the order of the batch. Sums are in fp64: differences between two sums of a
    thousand nats matter at a hundredth, while fp32 resolves only a ten-thousandth at that size.
    `tail` is `Recipe.tail_weight`.
    """
    logps, balance = _token_values(model, batch, statistics=False)
    return _per_document(_less_of_tails(logps, batch, tail), batch), balance


def _less_of_tails(logps: torch.Tensor, batch: MicroBatch, tail: float) -> torch.Tensor:
    """Values (trained_tokens,) times `tail` beyond the length of the pair's shorter answer.

    Raises:
        FinetuneError: no process has all tokens of a document (`MicroBatch.divided`).
    """
    if tail == 1.0:
        return logps
    if batch.divided is not None:
        raise FinetuneError(
            "ld_alpha: it counts the tokens of an answer, and no process has all tokens of one "
            "under this backend; use fsdp_full_shard"
        )
    lengths = batch.document_labels
    starts, shorter = lengths.cumsum(0) - lengths, lengths.view(-1, 2).amin(1).repeat_interleave(2)
    ends = (starts + shorter).repeat_interleave(lengths, output_size=len(logps))
    return torch.where(torch.arange(len(logps), device=logps.device) < ends, logps, tail * logps)


class Values(NamedTuple):
    """Sums over the trained tokens of each document, (documents,) in fp64."""

    logps: torch.Tensor
    """Log-probabilities."""
    compared: torch.Tensor
    """Log-probabilities with `Recipe.tail_weight`."""
    logits: torch.Tensor
    """Mean logits over the vocabulary, without gradient; NaN if the head does not compute them, see
    `finetune.kernels.head.LabelledHead.means`."""
    entropies: torch.Tensor
    """Entropies of the predicted distributions in nats, without gradient."""
    balance: torch.Tensor | None
    """`Loss.balance`."""


def sequence_values(model: torch.nn.Module, batch: MicroBatch, tail: float = 1.0) -> Values:
    """`sequence_logps` with statistics of the predicted distributions."""
    values, balance = _token_values(model, batch, statistics=True)
    logps, *others = values.view(3, -1)
    apart = (_per_document(each.detach(), batch) for each in others)
    whole = compared = _per_document(logps, batch)
    if tail != 1.0:
        compared = _per_document(_less_of_tails(logps, batch, tail), batch)
    return Values(whole, compared, *apart, balance)


def _per_document(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sums of the values (trained_tokens,) of each document, (documents,) in fp64."""
    values, part = values.double(), batch.divided
    if not batch.rows:  # torch 2.13 does not reduce an empty tensor
        return values
    lengths = batch.document_labels if part is None else part.labels
    if not len(values):  # a part without labels
        sums = values.new_zeros(len(lengths)) + values.sum()
    else:
        # `unsafe` skips checks that would synchronize with a GPU.
        sums = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return sums if part is None else SummedOnFirst.apply(sums, part.group)


def taught_loss_sum(
    model: torch.nn.Module, batch: MicroBatch, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a student and its cross-entropy, summed over the trained tokens: scalars in fp32.

    `finetune.kernels.divergence.give_teacher` must have been applied to `model`, which may be
    wrapped. Logits are computed in chunks.
    """
    places, targets = labelled(batch)
    given = batch.inputs() | {"places": places, "targets": targets, "taught": target}
    total, nll = model(**given, use_cache=False).unbind()
    return total, nll


def sequence_scores(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Scores at the last token of each document, (documents, labels) in fp32.

    `model`, which may be wrapped, has been through `finetune.kernels.score_head.give_scores`.
    """
    part = batch.divided
    places = batch.last_places if part is None else part.last_places
    scores = model(**batch.inputs(), use_cache=False, places=places)
    if part is None:
        return scores
    whole = scores.new_zeros(len(part.labels), scores.shape[1])
    return SummedOnFirst.apply(whole.index_copy(0, part.ended, scores), part.group)


def labelled(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat positions (trained_tokens,) of the hidden states that predict targets, and the targets.

    `batch.labels` (micro_rows, longest) is aligned with `batch.ids`; the token at t is predicted
    from position t - 1, so the first label of a row is never used. In packed rows, the first token
    of each document has no label, so that no document is predicted from another. The first token
    after a shared prompt is predicted from the last token of that prompt (`batch.places`).
    """
    length = batch.ids.shape[1]  # labels of a part of a row also have the next part's first
    trained = batch.labels[:, 1:] != UNTRAINED  # (micro_rows, longest - 1)
    # The size is known, which avoids a synchronization with the accelerator.
    row, column = torch.nonzero_static(trained, size=batch.trained_tokens).unbind(1)
    places = row * length + column if batch.places is None else batch.places
    return places, batch.labels[row, column + 1]


class SummedOnFirst(torch.autograd.Function):
    """Sum over a process group on its first process, which sends the gradient to all.

    The other processes get no rows, so a loss of the sums is computed once: its gradient reaches
    the values of every process, as that of a sum over all tokens on one process would.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum `values`, (documents, ...); (0, ...) on all processes but the first."""
        ctx.group, ctx.shape = group, values.shape
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.reduce(total, group=group, group_dst=0)
        return total if torch.distributed.get_rank(group) == 0 else total[:0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        sent = grad.contiguous() if len(grad) else grad.new_empty(ctx.shape)
        torch.distributed.broadcast(sent, group=ctx.group, group_src=0)
        return sent, None
