"""Experiment trackers hear of steps and evaluations: TensorBoard, W&B, MLflow, Trackio.

All go through Accelerate's trackers, which act on the main process only.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.runs.metrics import Evaluated, Listener, Record, Trained
from finetune.runs.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator


def open_trackers(accelerator: "Accelerator", run: Run, recipe: Mapping[str, Any]) -> None:
    """Start the trackers that a recipe asks for, each with the run's name.

    TensorBoard and W&B write into the run's directory; MLflow and Trackio where they are told to
    (MLFLOW_TRACKING_URI, TRACKIO_DIR), else where they always do.

    `recipe` is the resolved recipe as plain values; trackers get it flat (`optim.lr`: 0.0002).
    Raises FinetuneError where one does not start, or is not installed: Accelerate 1.15 leaves that
    one out silently.
    """
    from accelerate.tracking import filter_trackers  # heavy: only where one was asked for

    accelerator.project_configuration.set_directories(str(run.root))
    accelerator.log_with = filter_trackers(list(recipe["trackers"]), run.root)
    found = {str(tracker) for tracker in accelerator.log_with}
    missing = [name for name in recipe["trackers"] if name not in found]
    if missing:
        raise FinetuneError(
            *(f"trackers: {name!r} is not installed; run: pip install {name}" for name in missing)
        )
    try:
        accelerator.init_trackers(
            "finetune",
            config=_flat(recipe),
            init_kwargs={
                "wandb": {"name": run.root.name, "dir": str(run.root)},
                "mlflow": {"run_name": run.root.name},
                "trackio": {"name": run.root.name},
            },
        )
    except Exception as error:  # each tracker has its own: no account, no server, a full quota
        reason = str(error).strip().split("\n")[0]
        names = ", ".join(recipe["trackers"])
        raise FinetuneError(f"trackers: one of {names} does not start: {reason}") from error


def track(accelerator: "Accelerator") -> Listener:
    """A listener that sends the numbers of steps and evaluations to Accelerate's trackers."""

    def log(record: Record) -> None:
        values = tracked(record)
        if values:
            accelerator.log(values, step=record.step)

    return log


def tracked(record: Record) -> dict[str, float]:
    """What trackers see of a record, such as `train/loss`; nothing but steps and evaluations."""
    if not isinstance(record, Trained | Evaluated):
        return {}
    fields = dataclasses.asdict(record)
    return {
        f"{record.kind}/{name}": float(value)
        for name, value in fields.items()
        if name not in ("step", "time", "best")
        if name != "router_aux_loss" or math.isfinite(value)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, str | int | float):
            flat[prefix + name] = value
        else:
            flat[prefix + name] = json.dumps(value)
    return flat
