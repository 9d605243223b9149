"""Training and evaluation steps: exact sums, one division, independent of the engine."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from finetune.data.rows.collate import MicroBatch, collate, with_noise
from finetune.data.rows.order import of_rank, rows_of_step, split_rows
from finetune.data.rows.prefetch import Feed, feed
from finetune.data.rows.store import Rows
from finetune.data.stream.windows import Stream, Taken
from finetune.distributed.base import Engine
from finetune.methods.losses import Sum
from finetune.recipe import Recipe
from finetune.runs.metrics import judged_by
from finetune.training.nonfinite import propagate_nonfinite, suspects
from finetune.training.optim import learning_rate
from finetune.training.passes import StepPasses
from finetune.training.sums import BALANCE, LOSS, Sums, means

SLOTS, TERMS = "slots", "terms"
"""Names of sums over ranks besides those of `Sums`."""


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
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Metrics known before the forward pass, the same on every rank."""
    passed_over: Mapping[str, Sum] = dataclasses.field(default_factory=dict[str, Sum])
    """This rank's contribution to the method's metrics from rows without a forward pass."""
    passes: StepPasses | None = None
    """What the method's `before_step` gets; None for a method without passes before a step."""
    taken: Taken | None = None
    """Where the rows are from, if they are of a stream."""

    @property
    def slots(self) -> int:
        """Token slots of this rank, including padding; a shared prompt counts once."""
        return sum(batch.ids.numel() for batch in self.batches)


class TakesSteps(Protocol):
    """A source of the rows of each step."""

    def take(self, step: int) -> StepRows:
        """This rank's rows of a step."""
        ...


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of a step over all ranks."""

    trained: int
    real: int
    slots: int
    """Token slots computed, including padding; a shared prompt counts once."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The micro-batch over which the memory of a step is measured, on this rank."""

    shape: tuple[int, int]
    """Rows of the last micro-batch and slots per row; the mean if padding-free."""
    padded: bool
    """Whether it contains padding."""
    labelled: int
    """Tokens with a label; the most of any micro-batch in a pipeline, which holds several."""
    longest: int
    """Tokens of its longest document; 0 if it is not padding-free."""
    attended: int
    """Its tokens in attention, where a shared prompt is repeated for each document."""
    images: int
    """Bytes of the inputs for its images."""

    @classmethod
    def of(cls, batches: list[MicroBatch], pipeline: bool) -> "Peak":
        """The last of the micro-batches of a step, or all of them in a pipeline."""
        last, held = batches[-1], batches if pipeline else batches[-1:]
        return cls(
            shape=last.shape,
            padded=last.attention_mask is not None,
            labelled=max(each.trained_tokens for each in held),
            longest=max(each.boundaries.longest if each.boundaries else 0 for each in held),
            attended=last.attended,
            images=sum(each.nbytes for each in last.images.values()),
        )


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, over all ranks but for `peak`."""

    loss: float
    """Mean over the loss terms of the global batch, including the load-balancing loss."""
    balance: float
    """The load-balancing loss times its coefficient, part of `loss`; NaN without one."""
    grad_norm: float
    """Norm of the unsharded gradient before clipping."""
    lr: float
    tokens: Tokens
    peak: Peak
    seconds: float
    data_seconds: float
    """Part of `seconds` spent waiting for rows."""
    noticed: Mapping[str, float]
    """Maximum over ranks of each value of `noticed`."""
    suspects: list[int] | None = None
    """Row numbers of a step that was skipped because its loss or gradient was not finite."""
    taken: Taken | None = None
    """As `StepRows.taken`."""
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
        return judged_by(best, self.loss, self.metrics)


def feeding(
    engine: Engine, rows: Rows, pad_id: int, steps: int
) -> contextlib.AbstractContextManager[Feed[StepRows]]:
    """The rows of steps 0 to `steps` for `train_step`, with the next step prefetched."""
    return feed(lambda step: rows_for(engine, rows, step, pad_id), steps, engine.device)


def streaming(
    engine: Engine, stream: Stream, like: Rows, pad_id: int, steps: int
) -> contextlib.AbstractContextManager[Feed[StepRows]]:
    """The rows of the next steps of a stream up to `steps`, in the layout of other rows."""

    def make(step: int) -> StepRows:
        taken = stream.take(step, like)
        chosen = np.arange(len(taken.rows))
        made = _step_rows(engine, taken.rows, chosen, step, pad_id, taken.window)
        return dataclasses.replace(made, taken=taken)

    return feed(make, steps, engine.device)


def rows_for(engine: Engine, rows: Rows, step: int, pad_id: int) -> StepRows:
    """This rank's micro-batches of a step, without communication."""
    recipe = engine.plan.recipe
    chosen = rows_of_step(step, len(rows), recipe.batch.rows, recipe.seed)
    return _step_rows(engine, rows, chosen, step, pad_id, epoch_of(step, recipe, rows))


def _step_rows(
    engine: Engine, rows: Rows, chosen: np.ndarray, step: int, pad_id: int, epoch: int
) -> StepRows:
    """This rank's micro-batches of the chosen rows of a step."""
    recipe = engine.plan.recipe
    cut = micro_batches(engine, rows, chosen)
    numbers, mine = [number for number, _ in cut], [taken for _, taken in cut]
    batches = [collate(rows, taken, pad_id, engine.device) for taken in mine]
    if (alpha := recipe.model.neftune_alpha) is not None:
        given = zip(batches, mine, strict=True)
        batches = [with_noise(b, rows, taken, alpha, (recipe.seed, step)) for b, taken in given]
    # A pipeline needs equal shapes; processes that share a row take their tokens of it.
    batches, passes = engine.local_batches(batches, pad_id), None
    if recipe.passes_before_step:
        seeds = tuple(_dropout_seed(recipe.seed, step, number) for number in numbers)
        passes = StepPasses(
            engine, rows, pad_id, chosen, step, epoch, mine, batches.__getitem__, seeds
        )
    return StepRows(
        batches=batches,
        numbers=numbers,
        chosen=chosen,
        mine=mine,
        # Of all ranks, from what is known of every prepared row: the divisor needs no collective.
        terms=recipe.terms(rows, chosen),
        trained_tokens=int(rows.labelled[chosen].sum()),
        real_tokens=int(rows.lengths[chosen].sum()),
        passes=passes,
    )


def epoch_of(step: int, recipe: Recipe, rows: Rows) -> int:
    """The epoch in which a step begins."""
    return step * recipe.batch.rows // len(rows)


def micro_batches(engine: Engine, rows: Rows, chosen: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Row numbers of this rank's micro-batches of a step, with their global positions."""
    batch = engine.plan.recipe.batch
    cuts = split_rows(
        chosen, rows.slots, batch.micro_rows, batch.micro_tokens, rows.side_by_side, rows.prompts
    )
    return of_rank(cuts, engine.data_rank, engine.data_world)


def _dropout_seed(seed: int, step: int, number: int) -> int:
    """Depends only on the position in the global batch, so not on ranks or micro-batches."""
    return (seed * 1_000_003 + step * 65_537 + number) % 2**63


def _nothing() -> dict[str, int]:
    return {}


def train_step(
    engine: Engine,
    feed: TakesSteps,
    step: int,
    steps: int,
    measuring: contextlib.AbstractContextManager[None] | None = None,
    noticed: Callable[[], Mapping[str, int]] = _nothing,
    peak: float | None = None,
) -> StepResult:
    """Take optimizer step `step` (from 0) of `steps`.

    The gradient is that of the mean over all loss terms of the global batch: each micro-batch's
    sum is scaled by world x accumulation / terms, which undoes the engine's division by the
    accumulation and the mean over ranks. If the gradient is not finite, nothing is updated.

    Args:
        measuring: entered for the last micro-batch, its backward pass and the update, where the
            memory of a step peaks.
        noticed: more numbers of this rank by name, which are reduced to their maximum; every rank
            gives the same names.
        peak: peak learning rate, if it is no longer that of the plan.
    """
    started = time.perf_counter()
    plan, recipe = engine.plan, engine.plan.recipe
    rows = feed.take(step)
    waited = time.perf_counter() - started

    # The method may look at the complete step, with the weights that it starts from.
    batches = rows.batches if rows.passes is None else [*_with_step_values(recipe, rows.passes)]
    lr = learning_rate(step, steps, recipe.optim, plan.lr if peak is None else peak)
    scale = engine.averaged * plan.accumulation / max(1, rows.terms)
    # The load-balancing loss is a mean over tokens: this brings its sum to the unit of the terms.
    tokens_per_term = rows.real_tokens / max(1, rows.terms)
    seeds = [_dropout_seed(recipe.seed, step, number) for number in rows.numbers]
    tried = _attempt(engine, batches, seeds, lr, scale, tokens_per_term, measuring)
    while not tried.taken and engine.scale.lower():  # an overflow of fp16: the same step again
        tried = _attempt(engine, batches, seeds, lr, scale, tokens_per_term, None)
    # After the last attempt: an attempt that overflowed leaves no sums behind.
    tried.sums.add_metrics(rows.passed_over)

    # Besides the engine's reduction of gradients, this is the only collective of a step.
    sums, maxima, losses = tried.sums.on_host()
    local = {name: float(value) for name, value in noticed().items()}
    total, largest = engine.reduced(sums | {SLOTS: float(rows.slots)}, maxima | local)
    # A rank alone knows which of its micro-batches was not finite; a skipped step may gather.
    blamed = None if tried.taken else suspects(engine, losses, rows.mine, rows.chosen)
    return StepResult(
        loss=total[LOSS] / max(1, rows.terms),
        balance=total[BALANCE] / max(1, rows.terms) or math.nan,
        grad_norm=tried.norm,
        lr=lr,
        tokens=Tokens(rows.trained_tokens, rows.real_tokens, int(total[SLOTS])),
        peak=Peak.of(batches, plan.mesh.pipeline > 1),
        seconds=time.perf_counter() - started,
        data_seconds=waited,
        noticed={name: largest[name] for name in local},
        suspects=blamed,
        taken=rows.taken,
        metrics={**rows.metrics, **means(recipe, total, largest)},
    )


def _with_step_values(recipe: Recipe, passes: StepPasses) -> Iterator[MicroBatch]:
    """The micro-batches with what the method computes of the complete step before its passes."""
    value = recipe.before_step(passes)
    for at in range(len(passes.mine)):
        batch = passes.batch_of(at)
        places = torch.from_numpy(passes.places(at)).to(batch.ids.device)
        yield dataclasses.replace(batch, of_step=value, in_step=places)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """Result of the forward and backward passes of a step and its update."""

    sums: Sums
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
    sums = Sums(recipe, len(batches), engine.device)

    def loss_of(index: int, model: torch.nn.Module) -> torch.Tensor:
        loss = sums.add(index, recipe.loss(model, batches[index]), tokens_per_term)
        # A loss that is not finite may have a finite gradient, with which the step would be taken.
        return propagate_nonfinite(loss) * (scale * engine.scale.value)

    # Each step, because an evaluation or a sampling before it may have left eval mode on.
    engine.model.train()
    with contextlib.ExitStack() as measured:
        # Entered in the middle of `accumulate`, left after the update: the stack outlives both.
        entered = measuring or contextlib.nullcontext()
        engine.accumulate(batches, seeds, loss_of, lambda: measured.enter_context(entered))
        norm, taken = engine.step(lr)
    return _Attempt(sums, norm, taken)


@torch.no_grad()
def evaluate(engine: Engine, rows: Rows, pad_id: int) -> EvalResult:
    """Mean loss over the terms of all evaluation rows, independent of the number of ranks."""
    started = time.perf_counter()
    recipe = engine.plan.recipe
    micro_rows = recipe.evaluation.micro_rows
    micro_tokens = recipe.batch.micro_tokens if micro_rows is None else None
    chosen = np.arange(len(rows))
    cuts = split_rows(
        chosen, rows.slots, micro_rows or recipe.batch.micro_rows, micro_tokens, rows.side_by_side
    )
    # Equally many batches on every rank, because forward passes are collective.
    mine = [taken for _, taken in of_rank(cuts, engine.data_rank, engine.data_world)]

    def batch_of(at: int) -> MicroBatch:  # one at a time in memory
        collated = collate(rows, mine[at], pad_id, engine.device)
        return engine.local_batches([collated], pad_id)[0]

    batches = map(batch_of, range(len(mine)))
    if recipe.passes_before_step:
        passes = StepPasses(engine, rows, pad_id, chosen, 0, 0, mine, batch_of)
        batches = _with_step_values(recipe, passes)
    sums, terms = Sums(recipe, len(mine), engine.device), 0
    engine.model.eval()
    for at, batch in enumerate(batches):
        terms += recipe.count(batch)

        def forward(
            _: int, model: torch.nn.Module, batch: MicroBatch = batch, at: int = at
        ) -> torch.Tensor:
            # The loss on held-out rows is the method's alone.
            return sums.add(at, dataclasses.replace(recipe.loss(model, batch), balance=None))

        engine.forward_only(batch, forward)
    # No backward pass follows that would do it.
    engine.reshard()
    found, maxima, _ = sums.on_host()
    total, largest = engine.reduced(found | {TERMS: float(terms)}, maxima)
    return EvalResult(
        loss=total[LOSS] / max(1.0, total[TERMS]),
        tokens=int(total[TERMS]),
        seconds=time.perf_counter() - started,
        metrics=means(recipe, total, largest),
    )
