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

    folder: str
    card: str
    steps: list[float]
    """Of the median time of a step, after the first."""
    peaks: list[float]
    """Of the peak memory of tensors."""

    def line(self, seconds: float, peak: float) -> str:
        """The ratios as text, with a step and a peak as predicted here times their medians."""
        steps, peaks = statistics.median(self.steps), statistics.median(self.peaks)
        return (
            f"calibrated   on {self.card}, {len(self.steps)} of the runs in {self.folder} took "
            f"{steps:.2f} ({min(self.steps):.2f} to {max(self.steps):.2f}) of their planned steps, "
            f"and {peaks:.2f} ({min(self.peaks):.2f} to {max(self.peaks):.2f}) of their memory: by "
            f"the medians {duration(steps * seconds)} a step, {size(peaks * peak)}"
        )


def calibration(folder: Path, card: str) -> Calibration:
    """The ratios of the runs in a folder that trained on a card.

    Raises:
        FinetuneError: no run there has a prediction and a measurement on the card.
    """
    found, others = Calibration(str(folder), card, [], []), Counter[str]()
    for run in find_runs(folder):
        foreseen: dict[str, Any] = read_object(run.plan).get("prediction") or {}
        ratios = _ratios(run, foreseen)
        if ratios is not None and foreseen["machine"] == card:
            found.steps.append(ratios[0])
            found.peaks.append(ratios[1])
        elif ratios is not None:
            others[foreseen["machine"]] += 1
    if found.steps:
        return found
    have = "".join(f"; there are {count} on {name}" for name, count in others.items())
    raise FinetuneError(
        f"--calibrate: {folder} has no run of two steps or more on {card} with a prediction{have}; "
        "train one, or name another folder by --runs"
    )


def _ratios(run: Run, foreseen: dict[str, Any]) -> tuple[float, float] | None:
    """Measured over predicted of a run's step and peak; None if it lacks one of them."""
    seconds = [each["seconds"] for each in run.read_metrics("train")][1:]
    counted = [each for each in run.read_metrics("memory") if each.get("predicted")]
    if not (seconds and counted and foreseen.get("step_seconds")):
        return None
    peak = counted[-1]["peak"] / counted[-1]["predicted"]
    return statistics.median(seconds) / foreseen["step_seconds"], peak
