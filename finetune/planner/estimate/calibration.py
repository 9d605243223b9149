"""Compare the predictions of a machine's own runs with what those runs measured."""

import dataclasses
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.estimate.wording import duration, size
from finetune.runs.progress import find_runs
from finetune.runs.run import Run, read_object


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured over predicted, of each run in a folder that trained on a card."""

    folder: Path
    card: str
    steps: list[float]
    """Of the median time of a step, after the first."""
    peaks: list[float]
    """Of the peak memory of tensors."""

    def line(self, seconds: float, peak: float) -> str:
        """The ratios as text, with a step and a peak as predicted here times their medians."""
        steps, peaks = statistics.median(self.steps), statistics.median(self.peaks)
        return (
            f"calibrated   {len(self.steps)} runs of {self.folder} on {self.card} took "
            f"{_range(self.steps)} of their planned steps, and {_range(self.peaks)} of their "
            f"memory: by the medians {duration(steps * seconds)} a step, {size(peaks * peak)}"
        )

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}


def calibration(folder: Path, card: str) -> Calibration:
    """The ratios of the runs in a folder that trained on a card.

    Raises:
        FinetuneError: no run there has a prediction and a measurement on the card.
    """
    found, others = Calibration(folder, card, [], []), Counter[str]()
    for run in find_runs(folder):
        kind, step, peak = _measured(run)
        if kind == card and step is not None and peak is not None:
            found.steps.append(step)
            found.peaks.append(peak)
        elif kind is not None:
            others[kind] += 1
    if found.steps:
        return found
    have = ", ".join(f"{count} on {name}" for name, count in others.items())
    raise FinetuneError(
        f"--calibrate {folder}: has no run of two steps or more on {card} with a prediction"
        f"{f' (but {have})' if have else ''}; train one, or name another folder by --runs"
    )


def _measured(run: Run) -> tuple[str | None, float | None, float | None]:
    """The card of a run, and the ratios of its steps and of its peak; None if unknown."""
    foreseen: dict[str, Any] = read_object(run.plan).get("prediction") or {}
    planned = foreseen.get("step_seconds")
    seconds = [each["seconds"] for each in run.read_metrics("train")][1:]
    peaks = [
        each["peak"] / each["predicted"]
        for each in run.read_metrics("memory") if each.get("predicted")
    ]  # fmt: skip
    step = statistics.median(seconds) / planned if planned and seconds else None
    return foreseen.get("machine"), step, peaks[-1] if peaks else None


def _range(ratios: list[float]) -> str:
    """Median, lowest and highest of some ratios."""
    middle = f"{statistics.median(ratios):.2f}"
    return f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else middle
