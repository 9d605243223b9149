"""Log steps and evaluations to experiment trackers: TensorBoard, W&B, MLflow, Trackio.

All of them are Accelerate's trackers, which log on the main process only.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune import extensions
from finetune.errors import FinetuneError, reading, refuse
from finetune.runs.metrics import Evaluated, Listener, Record, Trained
from finetune.runs.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker


def open_trackers(accelerator: "Accelerator", run: Run, recipe: Mapping[str, Any]) -> None:
    """Start the trackers of a recipe, each with the run's name; `module:Class` is called with it.

    TensorBoard and W&B write to the run's directory; MLflow and Trackio to MLFLOW_TRACKING_URI and
    TRACKIO_DIR, or to their defaults.

    `recipe` is the resolved recipe as plain values; trackers get it flattened (`optim.lr`: 0.0002).
    Raises FinetuneError if a tracker does not start or is not installed: Accelerate 1.15 would
    silently ignore the latter.
    """
    from accelerate.tracking import filter_trackers  # a slow import, only needed with trackers

    accelerator.project_configuration.set_directories(str(run.root))
    built_in = [name for name in recipe["trackers"] if ":" not in name]
    own = [own_tracker(name) for name in recipe["trackers"] if ":" in name]
    with reading(f"trackers: one of {', '.join(recipe['trackers'])} does not start"):
        started = [kind(run.root.name) for kind in own]
    accelerator.log_with = [*filter_trackers(built_in, run.root), *started]
    found = {str(tracker) for tracker in accelerator.log_with}
    missing = [name for name in built_in if name not in found]
    refuse(f"trackers: {name!r} is not installed; run: pip install {name}" for name in missing)
    names = ", ".join(recipe["trackers"])
    with reading(f"trackers: one of {names} does not start"):  # no account, no server, a full quota
        accelerator.init_trackers(
            "finetune",
            config=_flat(recipe),
            init_kwargs={
                "wandb": {"name": run.root.name, "dir": str(run.root)},
                "mlflow": {"run_name": run.root.name},
                "trackio": {"name": run.root.name},
            },
        )


def own_tracker(name: str) -> "type[GeneralTracker]":
    """The class of a tracker from outside Accelerate's list, by `module:Class`.

    Raises:
        FinetuneError: it cannot be imported, or is no tracker.
    """
    from accelerate.tracking import GeneralTracker

    kind = extensions.find("trackers", name, {})
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise FinetuneError(f"trackers: {name}: expected a class of Accelerate's GeneralTracker")
    return kind


def track(accelerator: "Accelerator") -> Listener:
    """A listener that logs steps and evaluations to Accelerate's trackers."""

    def log(record: Record) -> None:
        values = tracked(record)
        if values:
            accelerator.log(values, step=record.step)

    return log


def tracked(record: Record) -> dict[str, float]:
    """Values to log for a record, such as `train/loss`; empty except for steps and evaluations."""
    if not isinstance(record, Trained | Evaluated):
        return {}
    fields = dataclasses.asdict(record)
    fields |= fields.pop("metrics")
    return {
        f"{record.kind}/{name}": float(value)
        for name, value in fields.items()
        if name not in ("step", "time", "best")
        if name not in ("router_aux_loss", *record.metrics) or math.isfinite(value)
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
