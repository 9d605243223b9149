"""What the workers of a test session share is made by the first of them that needs it."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def once(place: Path, make: Callable[[Path], object]) -> Path:
    """Let the first worker that needs a path make it; what an interrupted one left is removed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    done = place.parent / f"{place.name}.done"
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)
            make(place)
            done.touch()
    return place
