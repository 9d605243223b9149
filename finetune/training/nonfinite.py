"""Handle a non-finite loss or gradient: name its rows, then skip the step or stop the run.

A non-finite loss makes the whole gradient NaN (`propagate_nonfinite`). The gradient norm is global,
so every rank of every engine skips the step by that one number, without another collective.
"""

import numpy as np
import torch

from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import TrainingFailure
from finetune.recipe import Optim

MOST_NAMED = 8
"""Maximum number of rows listed in a message."""


def propagate_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """The loss, with a gradient of NaN if its value is not finite.  # scalar"""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def suspects(
    engine: Engine, losses: torch.Tensor, mine: list[np.ndarray], chosen: np.ndarray
) -> list[int]:
    """Row numbers that may have caused a skipped step, the same on every rank.

    The rows of micro-batches whose loss is not finite; if every loss is finite and only the
    gradient is not, all rows of the step.

    Args:
        losses: (accumulation,) this rank's loss sums of its micro-batches.
        mine: (micro_rows,) row numbers of each micro-batch.
        chosen: (rows,) row numbers of the step.
    """
    finite = torch.isfinite(losses).tolist()
    bad = [int(row) for batch, fine in zip(mine, finite, strict=True) if not fine for row in batch]
    named = sorted({row for rank in engine.gather(bad) for row in rank})
    return named or sorted({int(row) for row in chosen})


def places(rows: list[int], data: Prepared) -> list[str]:
    """Source files and rows of the documents in prepared training rows, for messages."""
    return [data.place(document) for row in rows for document in data.train.numbers(row)]


def verdict(
    optim: Optim, step: int, loss: float, norm: float, rows: list[str], skipped: int
) -> str:
    """A warning about a skipped step after which training continues.

    Raises:
        TrainingFailure: the recipe says to stop, or `skipped`, which counts this step too, is over
            `optim.max_skipped`.
    """
    named = ", ".join(rows[:MOST_NAMED])
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    what = (
        f"step {step}: loss {loss:g}, gradient norm {norm:g}: the step was skipped; it "
        f"trained on {named}{more}"
    )
    if optim.on_nonfinite == "stop":
        raise TrainingFailure(
            f"{what}. Lower optim.lr, fix these rows, or set optim.on_nonfinite=skip to skip "
            f"up to optim.max_skipped={optim.max_skipped} such steps, and resume"
        )
    if skipped > optim.max_skipped:
        raise TrainingFailure(
            f"{what}. That makes {skipped} such steps, and optim.max_skipped is "
            f"{optim.max_skipped}: lower optim.lr or fix these rows, and resume"
        )
    return what
