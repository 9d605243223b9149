"""Decide when a run has to save in order to end before its scheduler ends it."""

import time

from finetune.runs.metrics import Record
from finetune.runs.run import Run

SECONDS_OF_A_SAVE = 60.0
"""Seconds that the first checkpoint may take, before one is measured."""
SECONDS_TO_LEAVE = 20.0
"""Seconds from the last checkpoint until all processes have ended."""
KINDS = ("train", "eval", "save")


class TimeLimit:
    """A moment by which a run ends, and the time that it needs for this."""

    def __init__(self, run: Run, end: float | None) -> None:
        self._end = end
        self._slowest = dict.fromkeys(KINDS, 0.0)
        for record in () if end is None else run.read_metrics():  # of earlier starts
            self._measure(str(record.get("kind")), record.get("seconds"))

    def listen(self, record: Record) -> None:
        """Measure a step, an evaluation or a save; a listener of `Metrics`."""
        self._measure(record.kind, getattr(record, "seconds", None))

    def _measure(self, kind: str, seconds: float | None) -> None:
        if kind in KINDS and seconds is not None:
            self._slowest[kind] = max(self._slowest[kind], seconds)

    def reached(self, slowest_save: float) -> bool:
        """Whether to save now: another step, an evaluation and two saves would end too late.

        Args:
            slowest_save: seconds of the slowest checkpoint of this process, with the time in the
                background; 0 before the first.
        """
        if self._end is None:
            return False
        step, evaluation, save = (self._slowest[kind] for kind in KINDS)
        save = max(save, slowest_save) or SECONDS_OF_A_SAVE
        return time.time() + 2 * step + evaluation + 2 * save + SECONDS_TO_LEAVE > self._end
