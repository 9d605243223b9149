"""Read from a run directory where its run stands: whether it trains, its step, the time left."""

import dataclasses
import fcntl
import math
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.runs.run import Run

ENDS = {"finished": "finished", "early stop": "stopped early", "interrupted": "interrupted"}
"""State of a run that nothing trains in, by the reason of its last record."""
FILES = ("plan.json", "job.json", "run.lock")
"""A directory with one of them is a run's."""
COMPLETE = ("finished", "stopped early")


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a run stands."""

    state: str
    """`running`, `killed`, `not started`, or a value of `ENDS`."""
    step: int
    steps: int | None
    loss: float
    """Of the last step; NaN before the first."""
    seconds_left: float
    """Estimate from the steps since the last start; NaN if it is not running or unknown."""


def standing(run: Run) -> Standing:
    """Where a run stands, from its lock and its metrics."""
    start: dict[str, Any] = {}
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for record in run.read_metrics():
        if record.get("kind") == "start":
            start, first = record, {}
        elif record.get("kind") == "train":
            first, last = first or record, record
    held = holder(run) is not None
    state = "running" if held else "killed" if start else "not started"
    if not held and record.get("kind") == "end":
        state = ENDS.get(str(record.get("reason")), "killed")
    steps, step = start.get("steps"), last.get("step", 0)
    left = math.nan
    if held and first and step > first["step"]:
        left = (last["time"] - first["time"]) / (step - first["step"]) * (start["steps"] - step)
    loss = last.get("loss")
    return Standing(state, step, steps, math.nan if loss is None else loss, left)


def holder(run: Run) -> str | None:
    """The process that trains in a run directory, as `process 12 on HOST`, or None."""
    try:
        with (run.root / "run.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
            except OSError:  # a file system without locks
                return None
    except OSError:
        pass
    return None


def run_at(root: str) -> Run:
    """The run in a directory, which may not have started; raises FinetuneError for another one."""
    run = Run(Path(root))
    if not _is_run(run.root):
        raise FinetuneError(f"{root}: not a run directory (it has none of {', '.join(FILES)})")
    return run


def runs_in(folder: Path) -> list[Run]:
    """The run directories in a folder, or the folder itself if it is one, by name."""
    places = [folder, *sorted(folder.iterdir() if folder.is_dir() else ())]
    return [Run(place) for place in places if _is_run(place)]


def _is_run(place: Path) -> bool:
    return any((place / name).is_file() for name in FILES)
