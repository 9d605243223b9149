"""A loss or gradient that is not finite: which rows it came from, and what the recipe says to do.

A loss that is not finite makes the whole gradient so (`poison`). The norm of the gradient is that
of the job, so every rank on every engine drops the step by one number, without another meeting.
"""

from typing import Any

import torch

from finetune.data.order import micro_batches, rows_of_step
from finetune.engine import Engine
from finetune.errors import TrainingFailure
from finetune.recipe import Optim

MOST_NAMED = 8
"""Rows that a message names one by one."""


def poison(loss: torch.Tensor) -> torch.Tensor:
    """The loss, with a gradient of NaN where its value is not finite.  # scalar"""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def suspects(engine: Engine, losses: torch.Tensor, step: int, rows: int) -> list[int]:
    """Row numbers behind a step that was dropped, the same on every rank.

    `losses` are this rank's sums of its micro-batches.  # (accumulation,)
    Rows of the micro-batches whose loss is not finite; where every loss is finite and only the
    gradient is not, all rows of the step.
    """
    recipe = engine.plan.recipe
    chosen = rows_of_step(step, rows, recipe.batch.rows, recipe.seed)
    mine = micro_batches(chosen, recipe.batch.micro_rows, engine.rank, engine.world)
    finite = torch.isfinite(losses).tolist()
    bad = [int(row) for batch, fine in zip(mine, finite, strict=True) if not fine for row in batch]
    found: list[Any] = [bad]
    if engine.world > 1:
        found = [None] * engine.world
        torch.distributed.all_gather_object(found, bad)
    named = sorted({row for rank in found for row in rank})
    return named or sorted({int(row) for row in chosen})


def place(row: int, counts: dict[str, Any]) -> str:
    """A prepared training row for a person: its number, and its file where that can be told.

    Sources lie end to end in the prepared rows. A source of which every sample became one row,
    and none was held out, has its rows in their order in the file.
    """
    start = 0
    for source in counts["train"]["by_source"]:
        if row < start + source["rows"]:
            samples = source["samples"]
            if samples and source["rows"] % samples == 0:
                return f"row {row} ({source['source']}, sample {(row - start) % samples + 1})"
            return f"row {row} ({source['source']})"
        start += source["rows"]
    return f"row {row}"


def verdict(
    optim: Optim, step: int, loss: float, norm: float, rows: list[str], skipped: int
) -> str:
    """What to tell about a dropped step where training goes on.

    Raises:
        TrainingFailure: the recipe stops here; `skipped` counts this step too.
    """
    named = ", ".join(rows[:MOST_NAMED])
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    what = (
        f"step {step}: loss {loss:g}, gradient norm {norm:g}: the step was not taken; it "
        f"trained on {named}{more}"
    )
    if optim.on_nonfinite == "stop":
        raise TrainingFailure(
            f"{what}. Lower optim.lr, mend these rows, or set optim.on_nonfinite=skip to leave "
            f"out up to optim.max_skipped={optim.max_skipped} such steps, and resume"
        )
    if skipped > optim.max_skipped:
        raise TrainingFailure(
            f"{what}. It is the {skipped}th such step and optim.max_skipped is "
            f"{optim.max_skipped}: lower optim.lr or mend these rows, and resume"
        )
    return what
