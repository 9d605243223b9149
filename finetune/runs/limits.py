"""What this process may use of its machine: cores and memory.

Schedulers and containers limit both by control groups (cgroup, versions 1 and 2), which neither
`os.cpu_count` nor `psutil` reads.
"""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class Memory(NamedTuple):
    """Bytes of memory of this machine, or of the control group of this process."""

    total: int
    available: int


def usable_cores() -> int:
    """Cores that the scheduler gives this process, at least 1: by its affinity and its quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([cores, *map(math.floor, _quotas())]))


def limits_threads() -> bool:
    """Whether a quota allows fewer cores than OpenMP would count."""
    return any(quota < (os.cpu_count() or 1) for quota in _quotas())


def memory() -> Memory:
    """Memory that this process may use; a group's page cache counts as available."""
    import psutil  # a slow import that most commands do not need

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder, names in _groups("memory"):
        limit, used = (_numbers(folder / name) for name in names)
        if limit and used and limit[0] < machine.total:
            total = min(total, limit[0])
            available = min(available, limit[0] - used[0] + _page_cache(folder))
    return Memory(total, max(0, available))


def _quotas() -> Iterator[float]:
    """Cores of each group with a quota; without one, cpu.max is `max 100000` and v1 has -1."""
    for folder, names in _groups("cpu"):
        match [number for name in names for number in _numbers(folder / name)]:
            case [quota, period] if quota > 0:
                yield quota / period
            case _:
                pass


def _groups(controller: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder of each control group of this process, outermost last, and its files to read."""
    second = {"memory": ("memory.max", "memory.current"), "cpu": ("cpu.max",)}
    first = {
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    }
    for line in OWN.read_text().splitlines() if OWN.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, names = (GROUPS / controller, first) if controllers else (GROUPS, second)
        inside = root / path.strip("/")
        # In a container without a namespace of its own, the path is that of the host.
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root) and ".." not in folder.parts:
                yield folder, names[controller]


def _page_cache(folder: Path) -> int:
    """Bytes of files that the kernel drops when a group needs memory."""
    facts = folder / "memory.stat"
    lines = facts.read_text().splitlines() if facts.is_file() else []
    found = dict(line.split(maxsplit=1) for line in lines)
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _numbers(file: Path) -> list[int]:
    """The numbers in a file; none if it is not there."""
    words = file.read_text().split() if file.is_file() else []
    return [int(word) for word in words if word.lstrip("-").isdigit()]
