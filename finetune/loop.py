"""The training loop: exact sums, one division, and nothing that depends on the engine."""

import dataclasses
import math
import time
from collections.abc import Iterator

import torch

from finetune.data.batch import MicroBatch, collate
from finetune.data.order import micro_batches, rows_of_step
from finetune.data.prepare import Rows
from finetune.engine import Engine
from finetune.errors import TrainingFailure
from finetune.optim import learning_rate


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step of the whole job was."""

    loss: float
    """Mean over the loss terms of the global batch."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    trained_tokens: int
    real_tokens: int
    slots: int
    """Token slots that were computed, padding included."""
    seconds: float
    data_seconds: float
    """Of those, waited for rows."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """A pass over the evaluation rows."""

    loss: float
    tokens: int
    seconds: float


def train_step(engine: Engine, rows: Rows, step: int, steps: int, pad_id: int) -> StepResult:
    """Take optimizer step `step` (from 0) of `steps`.

    The gradient is that of the mean over all loss terms of the global batch: each micro-batch's
    sum is scaled by world x accumulation / terms, which undoes the engine's division by the
    accumulation and the mean over ranks.

    Raises:
        TrainingFailure: the loss is not finite.
    """
    begun = time.perf_counter()
    plan = engine.plan
    recipe = plan.recipe
    batches = list(_micro_batches(engine, rows, step, pad_id))
    waited = time.perf_counter() - begun
    counted = [
        sum(recipe.count(batch) for _, batch in batches),
        sum(batch.real_tokens for _, batch in batches),
        sum(batch.ids.numel() for _, batch in batches),
    ]
    terms, real_tokens, slots = (int(value) for value in engine.sum(counted))
    scale = engine.world * plan.accumulation / max(1, terms)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    engine.model.train()
    for index, (number, batch) in enumerate(batches):
        last = index == len(batches) - 1
        # Dropout depends on the seed, the step and the place in the global batch alone.
        torch.manual_seed(_dropout_seed(recipe.seed, step, number))
        with engine.unsynchronised(last):
            loss = recipe.loss(engine.model, batch)
            engine.backward(loss * scale, last)
        total += loss.detach()
    lr = learning_rate(step, steps, recipe.optim, plan.lr)
    norm = float(engine.step(lr))
    mean = engine.sum([total.item()])[0] / max(1, terms)
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise TrainingFailure(
            f"step {step + 1}: loss {mean}, gradient norm {norm}; lower optim.lr, or look at the "
            f"rows of this step with seed {recipe.seed}"
        )
    seconds = time.perf_counter() - begun
    return StepResult(mean, norm, lr, terms, real_tokens, slots, seconds, waited)


def _micro_batches(
    engine: Engine, rows: Rows, step: int, pad_id: int
) -> Iterator[tuple[int, MicroBatch]]:
    """This rank's micro-batches of a step, with their number in the global batch."""
    batch = engine.plan.recipe.batch
    chosen = rows_of_step(step, len(rows), batch.rows, engine.plan.recipe.seed)
    mine = micro_batches(chosen, batch.micro_rows, engine.rank, engine.world)
    for offset, indices in enumerate(mine):
        number = engine.rank * engine.plan.accumulation + offset
        yield number, collate(rows, indices, pad_id, engine.device)


def _dropout_seed(seed: int, step: int, number: int) -> int:
    return (seed * 1_000_003 + step * 65_537 + number) % 2**63


@torch.no_grad()
def evaluate(engine: Engine, rows: Rows, pad_id: int) -> EvalResult:
    """Mean loss over the terms of all evaluation rows, the same on any number of ranks."""
    begun = time.perf_counter()
    recipe = engine.plan.recipe
    micro = recipe.evaluation.micro_rows or recipe.batch.micro_rows
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    terms = 0
    engine.model.eval()
    stride = micro * engine.world
    for start in range(0, len(rows), stride):  # as often on every rank: forwards are collective
        first = min(start + engine.rank * micro, len(rows))
        indices = list(range(first, min(first + micro, len(rows))))
        batch = collate(rows, indices, pad_id, engine.device)
        terms += recipe.count(batch)
        total += recipe.loss(engine.model, batch)
    engine.reshard()
    summed, counted = engine.sum([total.item(), float(terms)])
    return EvalResult(summed / max(1.0, counted), int(counted), time.perf_counter() - begun)
