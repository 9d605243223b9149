"""A limit of time and memory for each conversation that a chat template renders.

A template is a program that comes with a stranger's model: the sandbox keeps it from files and from
Python's insides, not from loops without an end, nor from a text of ten gigabytes.
"""

import contextlib
import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from finetune.errors import FinetuneError

SECONDS = 4.0
"""Processor time of one conversation; a long one takes a hundredth of a second."""

BYTES = 2 << 30
"""Memory that one conversation may take beside what the process has."""

STATM = Path("/proc/self/statm")
"""Pages of this process, the first number; on Linux only."""


class _Endless(Exception):
    """The time of a conversation is over."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Within it, a template that takes too much time or memory ends with an error.

    Within another one it does nothing. The time is limited in the main thread only, where a signal
    can end what runs.

    Raises:
        FinetuneError: a limit was reached.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0:
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end) if main else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _most(soft)
    try:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        if main:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        yield
    except _Endless:
        raise FinetuneError(
            f"chat template: it did not come to an end within {SECONDS:g} s of processor time for "
            "this conversation; set model.chat_template to another one"
        ) from None
    except MemoryError:
        raise FinetuneError(
            "chat template: it takes too much memory for this conversation, more than "
            f"{BYTES >> 30} GiB or what is free; set model.chat_template to another one"
        ) from None
    finally:
        if main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        if most is not None:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most(soft: int) -> int | None:
    """The limit of the address space within a conversation; None where it stays."""
    pages = _pages(os.getpid())
    if pages is None:
        return None
    most = int(os.pread(pages, 100, 0).split()[0]) * resource.getpagesize() + BYTES
    return most if soft == resource.RLIM_INFINITY or most < soft else None


@functools.cache
def _pages(process: int) -> int | None:
    """The open file of this process's pages: to open it costs more than a conversation."""
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC) if STATM.exists() else None


def _end(number: int, frame: FrameType | None) -> None:
    raise _Endless
