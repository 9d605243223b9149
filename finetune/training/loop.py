"""The training loop: exact sums, one division, and nothing that depends on the engine."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from finetune.data.collate import MicroBatch, collate
from finetune.data.order import cut, deal, rows_of_step
from finetune.data.store import Rows
from finetune.distributed.engine import Engine
from finetune.kernels.balance import parts
from finetune.training.feed import Feed, feed
from finetune.training.nonfinite import poison, suspects
from finetune.training.optim import learning_rate


@dataclasses.dataclass(frozen=True)
class StepRows:
    """What one rank computes in a step, on its device, and what all ranks have in it together."""

    batches: list[tuple[int, MicroBatch]]
    """Each with its number in the global batch."""
    chosen: np.ndarray  # (rows,) int64: row numbers of the global batch
    mine: list[np.ndarray]  # (micro_rows,) int64: of them, those of each micro-batch
    terms: int
    """Terms of the loss, of all ranks."""
    real_tokens: int
    """Tokens that are no padding, of all ranks."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step of the whole job was."""

    loss: float
    """Mean over the loss terms of the global batch, the load-balancing loss included."""
    balance: float
    """Of that: the load-balancing loss times its coefficient; nan where there is none."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    trained_tokens: int
    real_tokens: int
    slots: int
    """Token slots that were computed, padding included."""
    shape: tuple[int, int]
    """Rows of this rank's last micro-batch, and slots of each: the mean of rows side by side."""
    padded: bool
    """Whether some of them are padding."""
    labelled: int
    """Tokens of that micro-batch that have a label."""
    longest: int
    """Tokens of its longest document, 0 where rows are not side by side."""
    seconds: float
    data_seconds: float
    """Of those, waited for rows."""
    largest: list[int]
    """The largest of what each rank noticed."""
    suspects: list[int] | None = None
    """Rows of a step that was not taken, because its loss or gradient was not finite."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """A pass over the evaluation rows."""

    loss: float
    tokens: int
    seconds: float


def feeding(
    engine: Engine, rows: Rows, pad_id: int, steps: int
) -> contextlib.AbstractContextManager[Feed[StepRows]]:
    """The rows of steps 0 to `steps` as `train_step` takes them, the next step's made ahead."""
    return feed(lambda step: rows_for(engine, rows, step, pad_id), steps, engine.device)


def rows_for(engine: Engine, rows: Rows, step: int, pad_id: int) -> StepRows:
    """This rank's micro-batches of a step; no other rank has to be asked for anything."""
    recipe = engine.plan.recipe
    chosen = rows_of_step(step, len(rows), recipe.batch.rows, recipe.seed)
    mine = _micro_batches(engine, rows, chosen)
    return StepRows(
        batches=[(number, collate(rows, taken, pad_id, engine.device)) for number, taken in mine],
        chosen=chosen,
        mine=[taken for _, taken in mine],
        terms=recipe.terms(rows, chosen),
        real_tokens=int(rows.lengths[chosen].sum()),
    )


def _nothing() -> list[int]:
    return []


def train_step(
    engine: Engine,
    feed: Feed[StepRows],
    step: int,
    steps: int,
    measuring: contextlib.AbstractContextManager[None] | None = None,
    noticed: Callable[[], list[int]] = _nothing,
) -> StepResult:
    """Take optimizer step `step` (from 0) of `steps`.

    The gradient is that of the mean over all loss terms of the global batch: each micro-batch's
    sum is scaled by world x accumulation / terms, which undoes the engine's division by the
    accumulation and the mean over ranks. `measuring` is entered for the last micro-batch, its
    backward pass and the update: what happens there holds all that a step ever holds. Where the
    gradient is not finite, nothing is updated. Besides what the engine does for gradients, ranks
    meet once, at the end; what `noticed` gives then, as many numbers on every rank, goes with it.
    """
    begun = time.perf_counter()
    plan = engine.plan
    recipe = plan.recipe
    taken_rows = feed.take(step)
    batches, terms, real_tokens = taken_rows.batches, taken_rows.terms, taken_rows.real_tokens
    waited = time.perf_counter() - begun
    scale = engine.world * plan.accumulation / max(1, terms)
    losses: list[torch.Tensor] = []
    balances: list[torch.Tensor] = []
    engine.model.train()
    measured = contextlib.ExitStack()
    for index, (number, batch) in enumerate(batches):
        last = index == len(batches) - 1
        if last and measuring is not None:
            measured.enter_context(measuring)
        # Dropout depends on the seed, the step and the place in the global batch alone.
        torch.manual_seed(_dropout_seed(recipe.seed, step, number))
        with engine.unsynchronised(last):
            loss, balance = parts(recipe.loss(engine.model, batch), real_tokens / max(1, terms))
            engine.backward(poison(loss) * scale, last)
        losses.append(loss.detach())
        balances.append(balance.detach())
    lr = learning_rate(step, steps, recipe.optim, plan.lr)
    norm, taken = engine.step(lr)
    measured.close()
    # One copy from the device; fp64, which not every device has, on the host.
    sums, balanced = torch.stack([*losses, *balances]).cpu().double().chunk(2)  # (accumulation,)
    slots = sum(batch.ids.numel() for _, batch in batches)
    totals, largest = engine.meet([sums.sum().item(), balanced.sum().item(), slots], noticed())
    mean, balance = totals[0] / max(1, terms), totals[1] / max(1, terms)
    blamed = None if taken else suspects(engine, sums, taken_rows.mine, taken_rows.chosen)
    seconds = time.perf_counter() - begun
    final = batches[-1][1]
    return StepResult(
        loss=mean,
        balance=balance if balance else math.nan,
        grad_norm=norm,
        lr=lr,
        trained_tokens=terms,
        real_tokens=real_tokens,
        slots=int(totals[2]),
        shape=final.shape,
        padded=final.attention_mask is not None,
        labelled=final.trained_tokens,
        longest=final.boundaries.longest if final.boundaries is not None else 0,
        seconds=seconds,
        data_seconds=waited,
        largest=largest,
        suspects=blamed,
    )


def _micro_batches(engine: Engine, rows: Rows, chosen: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Row numbers of this rank's micro-batches of a step, with their place in the global batch."""
    batch = engine.plan.recipe.batch
    cuts = cut(chosen, rows.lengths, batch.micro_rows, batch.micro_tokens, rows.side_by_side)
    return deal(cuts, engine.rank, engine.world)


def _dropout_seed(seed: int, step: int, number: int) -> int:
    return (seed * 1_000_003 + step * 65_537 + number) % 2**63


@torch.no_grad()
def evaluate(engine: Engine, rows: Rows, pad_id: int) -> EvalResult:
    """Mean loss over the terms of all evaluation rows, the same on any number of ranks."""
    begun = time.perf_counter()
    recipe = engine.plan.recipe
    micro_rows = recipe.evaluation.micro_rows
    micro_tokens = recipe.batch.micro_tokens if micro_rows is None else None
    cuts = cut(
        np.arange(len(rows)), rows.lengths, micro_rows or recipe.batch.micro_rows, micro_tokens,
        rows.side_by_side,
    )  # fmt: skip
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    terms = 0
    engine.model.eval()
    # As many on every rank: forward passes are collective.
    for _, indices in deal(cuts, engine.rank, engine.world):
        batch = collate(rows, indices, pad_id, engine.device)
        terms += recipe.count(batch)
        total += recipe.loss(engine.model, batch)
    engine.reshard()
    summed, counted = engine.sum([total.item(), float(terms)])
    return EvalResult(summed / max(1.0, counted), int(counted), time.perf_counter() - begun)
