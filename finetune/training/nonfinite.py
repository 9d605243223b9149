"""A loss or gradient that is not finite: which rows it came from, and what the recipe says to do.

A loss that is not finite makes the whole gradient so (`poison`). The norm of the gradient is that
of the job, so every rank on every engine drops the step by one number, without another meeting.
"""

import numpy as np
import torch

from finetune.data.prepare import Prepared
from finetune.distributed.engine import Engine
from finetune.errors import TrainingFailure
from finetune.recipe import Optim

MOST_NAMED = 8
"""Rows that a message names one by one."""


def poison(loss: torch.Tensor) -> torch.Tensor:
    """The loss, with a gradient of NaN where its value is not finite.  # scalar"""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def suspects(
    engine: Engine, losses: torch.Tensor, mine: list[np.ndarray], chosen: np.ndarray
) -> list[int]:
    """Row numbers behind a step that was dropped, the same on every rank.

    Rows of the micro-batches whose loss is not finite; where every loss is finite and only the
    gradient is not, all rows of the step.

    Args:
        losses: (accumulation,) this rank's sums of its micro-batches.
        mine: (micro_rows,) row numbers of each of them.
        chosen: (rows,) row numbers of the step.
    """
    finite = torch.isfinite(losses).tolist()
    bad = [int(row) for batch, fine in zip(mine, finite, strict=True) if not fine for row in batch]
    named = sorted({row for rank in engine.gather(bad) for row in rank})
    return named or sorted({int(row) for row in chosen})


def places(rows: list[int], data: Prepared) -> list[str]:
    """Prepared training rows for a person: the files and rows that their documents come from."""
    return [data.place(document) for row in rows for document in data.train.numbers(row)]


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
            f"{what}. That makes {skipped} such steps, and optim.max_skipped is "
            f"{optim.max_skipped}: lower optim.lr or mend these rows, and resume"
        )
    return what
