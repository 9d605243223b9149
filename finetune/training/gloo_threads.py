"""Let gloo's threads free the tensors of a collective before the training goes on.

A thread of gloo (torch 2.13) drops its references to the tensors of a collective shortly after
`wait()` has returned in the thread that trains. How long it takes depends on the load of the
machine, and until then tensors that the training has dropped stay in memory.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

TASKS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"
"""Name that PyTorch gives to the threads that run gloo's collectives."""
WAITS = {"wait", "wait_tensor"}
"""Names of the functions that return when a collective has finished."""
PAUSE = 1e-4
"""Seconds between two looks at the threads."""
LONGEST = 1.0
"""Seconds after which a thread that is still running is left alone."""


@contextlib.contextmanager
def released_on_time() -> Iterator[None]:
    """After each wait for a collective inside this context, wait for gloo's threads also.

    Tensors then live as long as the training refers to them, whatever the load. It has no effect
    without gloo, on an operating system other than Linux, or if a Python profiler is active.
    """
    threads = _threads()
    if not threads or sys.getprofile() is not None:
        yield
        return

    def returned(frame: FrameType, event: str, function: Any) -> None:
        # `Work.wait` is a C function; `wait_tensor` is one of Python.
        if event == "c_return":
            name = function.__name__
        elif event == "return":
            name = frame.f_code.co_name
        else:
            return
        if name in WAITS:
            _settle(threads)

    _settle(threads)
    sys.setprofile(returned)
    try:
        yield
    finally:
        sys.setprofile(None)


def _threads() -> list[Path]:
    """Folders of gloo's threads in this process; they start with a group and live as long."""
    found: list[Path] = []
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().rstrip() == NAME:
                found.append(task)
    return found


def _settle(threads: list[Path]) -> None:
    """Wait until none of the threads runs: each is idle, or waits for another process."""
    until = time.monotonic() + LONGEST
    quiet = 0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(PAUSE)  # without the lock of the interpreter, which freeing a tensor may need
        quiet = 0 if any(map(_runs, threads)) else quiet + 1


def _runs(thread: Path) -> bool:
    """Whether a thread runs or is ready to: the third field of `stat` in proc(5)."""
    with open(thread / "stat", encoding="ascii") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "R"
