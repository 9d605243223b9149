"""Say on standard error how far a long job is; nothing is said of a job of a few seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from finetune.process import rendezvous
from finetune.runs import units

QUIET = 5.0
"""Seconds before anything is said."""
APART = 10.0
"""Seconds between two lines of a log, and at least a tenth of the time so far."""
REDRAWN = 0.5
"""Seconds between two states of the line in a terminal."""

Item = TypeVar("Item")
_jobs: list["_Job"] = []
"""Jobs of this process, each a part of the one before; only the last is shown."""


class _Job:
    def __init__(self, name: str, total: int | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.started, self.ended = 0, time.monotonic(), threading.Event()
        self.stream = sys.stderr  # the job may redirect what libraries print

    def show(self) -> None:
        """Write lines until the job ends."""
        terminal, spoke, drawn = self.stream.isatty(), 0.0, False
        while not self.ended.wait(REDRAWN):
            seconds = time.monotonic() - self.started
            if _jobs[-1:] != [self] or seconds < QUIET:
                continue
            if terminal:
                self.stream.write(f"\r\x1b[2K{self.line(seconds)}")
                drawn = True
            elif not spoke or seconds - spoke >= max(APART, 0.1 * seconds):
                self.stream.write(f"{self.line(seconds)}\n")
                spoke = seconds
            self.stream.flush()
        if drawn:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def line(self, seconds: float) -> str:
        facts = [units.duration(seconds)]
        if self.done:
            whole = "" if self.total is None else f" of {self.total:,}"
            facts.insert(0, f"{self.done:,}{whole} {self.unit}")
        if self.total is not None and self.done:
            left = seconds / self.done * (self.total - self.done)
            facts.append(f"{units.duration(left)} left")
        return f"{self.name}: {', '.join(facts)}"


@contextlib.contextmanager
def progress(
    name: str, total: int | None = None, unit: str = "rows"
) -> Iterator[Callable[[int], None]]:
    """Show a job while it runs, on the first process of a launch; yields a function to count on.

    Args:
        name: What is done, such as `answers of runs/mine`.
        total: Number of units, if known.
        unit: Plural name of what is counted.
    """
    job = _Job(name, total, unit)

    def count(more: int = 1) -> None:
        job.done += more

    if rendezvous.rank() != 0:
        yield count
        return
    thread = threading.Thread(target=job.show, name="progress", daemon=True)
    _jobs.append(job)
    thread.start()
    try:
        yield count
    finally:
        job.ended.set()
        thread.join()
        _jobs.remove(job)


def counted(
    items: Iterable[Item],
    name: str,
    total: int | None = None,
    unit: str = "rows",
    size: Callable[[Item], int] = lambda _: 1,
) -> Iterator[Item]:
    """Yield items, and show how many, or the sum of their sizes, have been used."""
    with progress(name, total, unit) as count:
        for item in items:
            yield item
            count(size(item))
