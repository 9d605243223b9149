"""Number of cores that this process may use, which can be fewer than the machine has."""

import os
import sys


def usable_cores() -> int:
    """Cores to which the scheduler may move this process (on Linux; elsewhere, all of them)."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
