"""Explain an out-of-memory error: the prediction, what to change, and where to resume."""

from finetune.distributed.base import Engine
from finetune.errors import TrainingFailure
from finetune.planner.estimate.changes import changes
from finetune.planner.estimate.forecast import Forecast
from finetune.runs import units
from finetune.training.memory_meter import peak_bytes

MOST_NAMED = 3
"""Maximum number of changes listed in a message."""
USUAL = (
    "batch.micro_rows=1 (or fewer batch.micro_tokens)", "model.activation_checkpointing=true",
    "a backend that shards",
)  # fmt: skip
"""Changes to suggest without a prediction."""


def out_of_memory(
    error: BaseException, engine: Engine, forecast: Forecast | None, step: int, standing: str
) -> TrainingFailure:
    """The error to raise for a run that ran out of memory.

    Args:
        step: the current step, from 1; 0 before the first.
        standing: a sentence on where the run can be resumed from.
    """
    when = f"step {step}" if step else "before step 1"
    held = units.size(peak_bytes(engine.device))
    said = str(error).strip().splitlines()[0].split(". ")
    tried = ". ".join(part for part in said if "ried to allocate" in part) or said[0]
    predicted = (
        "no prediction for this model"
        if forecast is None
        else f"{units.size(forecast.peak_memory)} predicted"
    )
    return TrainingFailure(
        f"{when}: out of memory on {engine.device} of rank {engine.rank}, which had used up to "
        f"{held} ({predicted}): {tried.rstrip('.')}; change {' or '.join(_changes(forecast))}; "
        f"{standing}"
    )


def _changes(forecast: Forecast | None) -> list[str]:
    """Settings that lower the peak, free ones first."""
    if forecast is None or forecast.machine is None:
        return list(USUAL)
    precision = "fp32" if forecast.workload.compute == 4 else "bf16"
    found = changes(forecast.workload, forecast.machine, precision)
    named = [f"{each.setting} (-{units.size(round(each.gain))})" for each in found[:MOST_NAMED]]
    return named or list(USUAL)
