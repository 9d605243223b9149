"""Limit the time and memory that a chat template takes for a conversation.

A template is a program from an untrusted model: the sandbox blocks access to files and to Python
internals, but not infinite loops or a text of ten gigabytes.
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
"""Seconds of CPU time per conversation; a long one takes a hundredth of a second."""

BYTES = 2 << 30
"""Bytes that one conversation may allocate in addition to what the process has."""

STATM = Path("/proc/self/statm")
"""Memory statistics of this process; the first number is its size in pages. Linux only."""


class _Endless(Exception):
    """A conversation exceeded its time limit."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Context manager that stops a template that takes too much time or memory.

    Has no effect if nested. Time is limited in the main thread only, where a signal can interrupt
    the template.

    Raises:
        FinetuneError: a limit was exceeded.
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
            f"chat template: it did not finish within {SECONDS:g} s of CPU time for this "
            "conversation; set model.chat_template to another one"
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
    """Limit of the address space for a conversation, in bytes; None to keep the current limit."""
    pages = _pages(os.getpid())
    if pages is None:
        return None
    most = int(os.pread(pages, 100, 0).split()[0]) * resource.getpagesize() + BYTES
    return most if soft == resource.RLIM_INFINITY or most < soft else None


@functools.cache
def _pages(process: int) -> int | None:
    """File descriptor of `STATM`, cached because opening it takes longer than a conversation."""
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC) if STATM.exists() else None


def _end(number: int, frame: FrameType | None) -> None:
    raise _Endless
