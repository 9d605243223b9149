"""Training and evaluation steps: exact sums, one division, independent of the engine."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from finetune.data.collate import MicroBatch, collate
from finetune.data.order import of_rank, rows_of_step, split_rows
from finetune.data.store import Rows
from finetune.distributed.base import Engine
from finetune.kernels.balance import parts
from finetune.methods.losses import Loss, Sum
from finetune.recipe import Recipe
from finetune.training.answers import mismatched_batches, step_kl
from finetune.training.feed import Feed, feed
from finetune.training.nonfinite import propagate_nonfinite, suspects
from finetune.training.optim import learning_rate


@dataclasses.dataclass(frozen=True)
class StepRows:
    """One rank's micro-batches of a step, on its device, and totals over all ranks."""

    batches: list[MicroBatch]
    numbers: list[int]
    """Position of each micro-batch in the global batch."""
    chosen: np.ndarray  # (rows,) int64: row numbers of the global batch
    mine: list[np.ndarray]  # (micro_rows,) int64 each: row numbers of each micro-batch
    terms: int
    """Loss terms, over all ranks."""
    trained_tokens: int
    """Tokens with a label, over all ranks."""
    real_tokens: int
    """Tokens that are not padding, over all ranks; a shared prompt counts for each document."""
    mismatched: list[MicroBatch] = dataclasses.field(default_factory=list[MicroBatch])
    """This rank's micro-batches of mismatched answers, for methods that read the KL of a step."""
    reference: float = 0.0
    """Sum of the reference's log-probabilities of the mismatched answers, over all ranks."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Metrics known before the forward pass, the same on every rank."""
    passed_over: Mapping[str, Sum] = dataclasses.field(default_factory=dict[str, Sum])
    """This rank's contribution to the method's metrics from rows without a forward pass."""


class TakesSteps(Protocol):
    """A source of the rows of each step."""

    def take(self, step: int) -> StepRows:
        """This rank's rows of a step."""
        ...


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, over all ranks."""

    loss: float
    """Mean over the loss terms of the global batch, including the load-balancing loss."""
    balance: float
    """The load-balancing loss times its coefficient, part of `loss`; NaN without one."""
    grad_norm: float
    """Norm of the unsharded gradient before clipping."""
    lr: float
    trained_tokens: int
    real_tokens: int
    slots: int
    """Token slots computed, including padding; a shared prompt counts once."""
    shape: tuple[int, int]
    """Rows of this rank's last micro-batch and slots per row; the mean if padding-free."""
    padded: bool
    """Whether that micro-batch contains padding."""
    labelled: int
    """Tokens with a label in that micro-batch."""
    longest: int
    """Tokens of its longest document; 0 if it is not padding-free."""
    attended: int
    """Its tokens in attention, where a shared prompt is repeated for each document."""
    seconds: float
    data_seconds: float
    """Part of `seconds` spent waiting for rows."""
    largest: list[int]
    """Maximum over ranks of each value of `noticed`."""
    suspects: list[int] | None = None
    """Row numbers of a step that was skipped because its loss or gradient was not finite."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Means of the method's metrics over the step, without metrics that have a count of 0."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Result of a pass over the evaluation rows."""

    loss: float
    tokens: int
    """Loss terms that `loss` is the mean of: tokens or pairs."""
    seconds: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """As `StepResult.metrics`, over all rows."""

    def with_metrics(self, more: Mapping[str, float]) -> "EvalResult":
        """The same result with additional metrics."""
        return dataclasses.replace(self, metrics={**self.metrics, **more})

    def judged_by(self, best: str) -> float:
        """The value that `evaluation.best` names, negated if larger is better; NaN if missing."""
        name, sign = best.removeprefix("-"), 1 if best.startswith("-") else -1
        return self.loss if best == "loss" else sign * self.metrics.get(name, math.nan)


class _Metrics:
    """Sums and counts of a method's metrics over the micro-batches of one rank."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, names = recipe, recipe.metrics
        self.names = names
        self.sums = torch.zeros(len(names), dtype=torch.float32, device=device)
        self.counts = [0] * len(names)
        self.device_counts = torch.zeros_like(self.sums)
        """Counts that are known on the device only."""
        self.largest = torch.full((len(recipe.extremes),), -math.inf, device=device)
        """Running maxima; a minimum is stored negated."""

    def add(self, loss: Loss) -> None:
        """Add the metrics of a micro-batch, without synchronizing with the device."""
        if loss.extremes:
            named = [(name, loss.extremes[name].detach()) for name in self.recipe.extremes]
            given = torch.stack([-e if name.startswith("min_") else e for name, e in named])
            self.largest = torch.maximum(self.largest, given.float())
        self.add_sums(loss.metrics)

    def add_sums(self, found: Mapping[str, Sum]) -> None:
        if not self.names:
            return
        unknown = found.keys() - set(self.names)
        assert not unknown, f"not in the method's `metrics`: {unknown}"
        nothing = torch.zeros((), device=self.sums.device), 0
        of_names = [found.get(name, nothing) for name in self.names]
        self.sums += torch.stack([each.detach().float() for each, _ in of_names])
        counts = [count for _, count in of_names]
        if any(isinstance(each, torch.Tensor) for each in counts):
            zero = nothing[0]
            self.device_counts += torch.stack(
                [each.float() if isinstance(each, torch.Tensor) else zero for each in counts]
            )
        self.counts = [
            total + (0 if isinstance(each, torch.Tensor) else each)
            for total, each in zip(self.counts, counts, strict=True)
        ]

    def on_device(self) -> torch.Tensor:
        """Sums, and counts that are known on the device, (2 * metrics,)."""
        return torch.cat([self.sums, self.device_counts])

    def sums_and_counts(self, read: list[float]) -> list[float]:
        """All sums, then all counts, from the values of `on_device`."""
        sums, counts = read[: len(self.names)], read[len(self.names) :]
        return [*sums, *(a + b for a, b in zip(self.counts, counts, strict=True))]

    def over_ranks(self, totals: list[float], largest: list[float]) -> dict[str, float]:
        """Metrics of all ranks.

        Args:
            totals: sums over ranks of each metric, then of each count.
            largest: maxima over ranks.
        """
        extremes = {
            name: -value if name.startswith("min_") else value
            for name, value in zip(self.recipe.extremes, largest, strict=True)
            if math.isfinite(value)
        }
        sums, counts = totals[: len(self.names)], totals[len(self.names) :]
        found = zip(self.names, sums, counts, strict=True)
        means = {name: total / count for name, total, count in found if count}
        return self.recipe.derived(means) | means | extremes


def feeding(
    engine: Engine, rows: Rows, pad_id: int, steps: int
) -> contextlib.AbstractContextManager[Feed[StepRows]]:
    """The rows of steps 0 to `steps` for `train_step`, with the next step prefetched."""
    return feed(lambda step: rows_for(engine, rows, step, pad_id), steps, engine.device)


def rows_for(engine: Engine, rows: Rows, step: int, pad_id: int) -> StepRows:
    """This rank's micro-batches of a step, without communication."""
    recipe = engine.plan.recipe
    chosen = rows_of_step(step, len(rows), recipe.batch.rows, recipe.seed)
    mine = micro_batches(engine, rows, chosen)
    batches = [collate(rows, taken, pad_id, engine.device) for _, taken in mine]
    given, reference = list[MicroBatch](), 0.0
    if recipe.reads_kl:
        assert rows.step_reference is not None
        given = mismatched_batches(engine, rows, chosen, epoch_of(step, recipe, rows), pad_id)
        reference = float(rows.step_reference[step])
    return StepRows(
        batches=engine.local_batches(batches, pad_id),
        numbers=[number for number, _ in mine],
        chosen=chosen,
        mine=[taken for _, taken in mine],
        terms=recipe.terms(rows, chosen),
        trained_tokens=int(rows.labelled[chosen].sum()),
        real_tokens=int(rows.lengths[chosen].sum()),
        mismatched=given,
        reference=reference,
    )


def epoch_of(step: int, recipe: Recipe, rows: Rows) -> int:
    """The epoch in which a step begins."""
    return step * recipe.batch.rows // len(rows)


def _nothing() -> list[int]:
    return []


def train_step(
    engine: Engine,
    feed: TakesSteps,
    step: int,
    steps: int,
    measuring: contextlib.AbstractContextManager[None] | None = None,
    noticed: Callable[[], list[int]] = _nothing,
) -> StepResult:
    """Take optimizer step `step` (from 0) of `steps`.

    The gradient is that of the mean over all loss terms of the global batch: each micro-batch's
    sum is scaled by world x accumulation / terms, which undoes the engine's division by the
    accumulation and the mean over ranks. If the gradient is not finite, nothing is updated.
    Apart from the engine's reduction of gradients there is one collective, at the end.

    Args:
        measuring: entered for the last micro-batch, its backward pass and the update, where the
            memory of a step peaks.
        noticed: more numbers of this rank for the collective, which reduces them to their
            maximum; every rank gives equally many.
    """
    started = time.perf_counter()
    plan = engine.plan
    recipe = plan.recipe
    taken_rows = feed.take(step)
    batches, terms, real_tokens = taken_rows.batches, taken_rows.terms, taken_rows.real_tokens
    waited = time.perf_counter() - started
    if recipe.reads_kl:
        kl = step_kl(engine, taken_rows.mismatched, taken_rows.reference)
        batches = [dataclasses.replace(batch, kl=kl) for batch in batches]
    lr = learning_rate(step, steps, recipe.optim, plan.lr)
    tokens_per_term = real_tokens / max(1, terms)
    scale = engine.averaged * plan.accumulation / max(1, terms)
    # Dropout depends only on the seed, the step and the position in the global batch.
    seeds = [_dropout_seed(recipe.seed, step, number) for number in taken_rows.numbers]
    tried = _attempt(engine, batches, seeds, lr, scale, tokens_per_term, measuring)
    while not tried.taken and engine.scale.lower():  # an overflow of fp16
        tried = _attempt(engine, batches, seeds, lr, scale, tokens_per_term, None)
    metrics = tried.metrics
    metrics.add_sums(taken_rows.passed_over)
    norm, taken = tried.norm, tried.taken
    # One copy from the device; converted on the host because not every device has fp64.
    read = torch.cat([tried.sums.flatten(), metrics.on_device(), metrics.largest]).cpu().double()
    losses, balances = read[: 2 * len(batches)].chunk(2)  # (accumulation,)
    slots = sum(batch.ids.numel() for batch in batches)
    sums_end = 2 * len(batches) + 2 * len(metrics.names)
    measured_sums = metrics.sums_and_counts(read[2 * len(batches) : sums_end].tolist())
    brought = [losses.sum().item(), balances.sum().item(), slots, *measured_sums]
    seen: list[float] = [*noticed(), *read[sums_end:].tolist()]
    totals, most = engine.sums_and_maxima(_counted(engine, brought), seen)
    largest = [int(each) for each in most[: len(seen) - len(recipe.extremes)]]
    mean, balance = totals[0] / max(1, terms), totals[1] / max(1, terms)
    blamed = None if taken else suspects(engine, losses, taken_rows.mine, taken_rows.chosen)
    seconds = time.perf_counter() - started
    final = batches[-1]
    # Memory is measured over the last micro-batch, or over all of them in a pipeline.
    counted = batches if plan.mesh.pipeline > 1 else batches[-1:]
    return StepResult(
        loss=mean,
        balance=balance if balance else math.nan,
        grad_norm=norm,
        lr=lr,
        trained_tokens=taken_rows.trained_tokens,
        real_tokens=real_tokens,
        slots=int(totals[2]),
        shape=final.shape,
        padded=final.attention_mask is not None,
        labelled=max(batch.trained_tokens for batch in counted),
        longest=max(batch.boundaries.longest if batch.boundaries else 0 for batch in counted),
        attended=final.attended,
        seconds=seconds,
        data_seconds=waited,
        largest=largest,
        suspects=blamed,
        metrics={
            **taken_rows.metrics,
            **metrics.over_ranks(totals[3:], most[len(largest) :]),
        },
    )


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """Result of the forward and backward passes of a step and its update."""

    sums: torch.Tensor  # (2, accumulation): losses, and balances in them
    metrics: _Metrics
    norm: float
    taken: bool


def _attempt(
    engine: Engine,
    batches: list[MicroBatch],
    seeds: list[int],
    lr: float,
    scale: float,
    tokens_per_term: float,
    measuring: contextlib.AbstractContextManager[None] | None,
) -> _Attempt:
    """Compute the gradient of a step and update the weights if it is finite."""
    recipe = engine.plan.recipe
    sums = torch.zeros(2, len(batches), device=engine.device)
    metrics = _Metrics(recipe, engine.device)

    def loss_of(index: int, model: torch.nn.Module) -> torch.Tensor:
        found = recipe.loss(model, batches[index])
        loss, balance = parts(found.sum, found.balance, tokens_per_term)
        metrics.add(found)
        sums[:, index] = torch.stack([loss.detach(), balance.detach()])
        return propagate_nonfinite(loss) * (scale * engine.scale.value)

    engine.model.train()
    with contextlib.ExitStack() as measured:
        entered = measuring or contextlib.nullcontext()
        engine.accumulate(batches, seeds, loss_of, lambda: measured.enter_context(entered))
        norm, taken = engine.step(lr)
    return _Attempt(sums, metrics, norm, taken)


def _counted(engine: Engine, brought: list[float]) -> list[float]:
    """This rank's summands; zeros if another rank with the same rows already counts them."""
    return brought if engine.counts else [0.0] * len(brought)


def micro_batches(engine: Engine, rows: Rows, chosen: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Row numbers of this rank's micro-batches of a step, with their global positions."""
    batch = engine.plan.recipe.batch
    cuts = split_rows(
        chosen, rows.slots, batch.micro_rows, batch.micro_tokens, rows.side_by_side, rows.prompts
    )
    return of_rank(cuts, engine.data_rank, engine.data_world)


def _dropout_seed(seed: int, step: int, number: int) -> int:
    return (seed * 1_000_003 + step * 65_537 + number) % 2**63


@torch.no_grad()
def evaluate(engine: Engine, rows: Rows, pad_id: int) -> EvalResult:
    """Mean loss over the terms of all evaluation rows, independent of the number of ranks."""
    started = time.perf_counter()
    recipe = engine.plan.recipe
    micro_rows = recipe.evaluation.micro_rows
    micro_tokens = recipe.batch.micro_tokens if micro_rows is None else None
    cuts = split_rows(
        np.arange(len(rows)), rows.slots, micro_rows or recipe.batch.micro_rows, micro_tokens,
        rows.side_by_side,
    )  # fmt: skip
    sums: list[torch.Tensor] = []
    metrics, terms, kl = _Metrics(recipe, engine.device), 0, 0.0
    if recipe.reads_kl:
        assert rows.step_reference is not None
        given = mismatched_batches(engine, rows, np.arange(len(rows)), 0, pad_id)
        kl = step_kl(engine, given, float(rows.step_reference[0]))
    engine.model.eval()
    # Equally many batches on every rank, because forward passes are collective.
    for _, indices in of_rank(cuts, engine.data_rank, engine.data_world):
        given = dataclasses.replace(collate(rows, indices, pad_id, engine.device), kl=kl)
        (batch,) = engine.local_batches([given], pad_id)
        terms += recipe.count(batch)

        def forward(_: int, model: torch.nn.Module, batch: MicroBatch = batch) -> torch.Tensor:
            found = recipe.loss(model, batch)
            sums.append(found.sum)
            metrics.add(found)
            return found.sum

        engine.forward_only(batch, forward)
    engine.reshard()
    # Summed in fp64 on the host, because not every device has fp64.
    total = sum(torch.stack(sums).cpu().tolist()) if sums else 0.0
    brought = [total, float(terms), *metrics.sums_and_counts(metrics.on_device().tolist())]
    (summed, counted, *measured), most = engine.sums_and_maxima(
        _counted(engine, brought), metrics.largest.tolist()
    )
    return EvalResult(
        loss=summed / max(1.0, counted),
        tokens=int(counted),
        seconds=time.perf_counter() - started,
        metrics=metrics.over_ranks(measured, most),
    )
