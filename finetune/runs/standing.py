"""Which directories are runs, and which process trains in one."""

import contextlib
import fcntl
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.runs.run import Run

FILES = ("plan.json", "job.json", "job/log.txt", "run.lock")
"""A directory with one of them is a run's."""
COMPLETE = ("finished", "stopped early")


def holder(run: Run) -> str | None:
    """The process that trains in a run directory, as `process 12 on HOST`, or None."""
    return holder_of(run.lock)


def holder_of(lock: Path) -> str | None:
    """The process that holds a lock file, by what it wrote there, or None.

    The lock is taken for a moment and shared; a training that starts waits ten seconds for it.
    """
    with contextlib.suppress(OSError), lock.open() as file:  # there is none, or no locks there
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return None


def run_at(root: str) -> Run:
    """The run in a directory, which may not have started; raises FinetuneError for another one."""
    run = Run(Path(root))
    if not is_run(run.root):
        raise FinetuneError(f"{root}: not a run directory (it has none of {', '.join(FILES)})")
    return run


def is_run(place: Path) -> bool:
    return any((place / name).is_file() for name in FILES)
