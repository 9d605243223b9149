"""Evaluate chat templates in a process of their own, with limits of time and memory.

A template is a program from an untrusted model: the sandbox blocks access to files and to Python
internals, but not infinite loops or a text of ten gigabytes. Limits hold for a whole process: they
are set in one that only evaluates templates, a fork that takes milliseconds when it is needed, or
in one that only encodes rows.
"""

import atexit
import contextlib
import functools
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import Any, NoReturn, TypeVar

import jinja2

from finetune.errors import FinetuneError
from finetune.process.signals import SIGNALS

SECONDS = 4.0
"""Seconds of CPU time per conversation; a long one takes a hundredth of a second."""

BYTES = 2 << 30
"""Bytes that one conversation may allocate in addition to what the process has."""

IDLE_SECONDS = 30.0
"""Seconds without a conversation after which the process ends."""

TOO_SLOW = f"did not finish within {SECONDS:g} s of CPU time for this conversation"
TOO_LARGE = (
    f"takes too much memory for this conversation, more than {BYTES >> 30} GiB or what is free"
)

STATM = "/proc/self/statm"
"""Memory statistics of this process; the first number is its size in pages. Linux only."""

T = TypeVar("T")


class _Endless(BaseException):
    """A conversation exceeded its time limit; not an Exception, which Jinja's compiler catches."""


def within_limits(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a module's function that evaluates a chat template.

    Raises:
        FinetuneError: a limit was exceeded.
        jinja2.TemplateError: the template refuses the arguments.
    """
    templates = _templates(os.getpid())
    return (_limited if templates.are_here else templates.call)(function, *arguments)


def evaluate_here() -> None:
    """Evaluate templates in this process from now on, which must only encode rows."""
    signal.signal(signal.SIGVTALRM, _stop)
    with contextlib.suppress(FileNotFoundError):
        _templates(os.getpid()).statm = os.open(STATM, os.O_RDONLY)
    _templates(os.getpid()).are_here = True


@functools.cache
def _templates(process: int) -> "_Templates":
    """The templates of a process; its forks have others."""
    return _Templates()


class _Templates:
    """The process that evaluates templates for this one, for one thread at a time."""

    def __init__(self) -> None:
        self.are_here = False
        self.statm: int | None = None
        """File of this process's memory statistics, where there is one."""
        self._lock = threading.RLock()
        self._link: Connection | None = None
        self._id = 0
        atexit.register(_end, os.getpid())

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._lock:
            try:
                if self._link is None:
                    self._link, self._id = _start()
                self._link.send((function, arguments))
                found = self._link.recv()
            except BaseException as error:  # also Ctrl-C: the answer would be the next one's
                status = self.end()
                if not isinstance(error, EOFError | ConnectionError):
                    raise
                if status == 0:  # it was idle
                    return self.call(function, *arguments)
                ended = f"ended its process with status {status}, as when memory runs out"
                found = _refusal(TOO_SLOW if status == -signal.SIGPROF else ended)
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> int:
        """End the process, if there is one; returns the status with which it ended."""
        with self._lock:
            if self._link is None:
                return 0
            self._link.close()
            self._link = None
            os.kill(self._id, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self._id, 0)[1])


def _end(process: int) -> None:
    """End the process of templates with the one that started it, unless this is a fork of that."""
    if process == os.getpid():
        _templates(process).end()


def _start() -> tuple[Connection, int]:
    # First, because another thread may be importing it when the process is forked.
    import transformers.utils.chat_template_utils  # noqa: F401

    link, other = Pipe()
    process = os.fork()
    if not process:
        _serve(other)
    other.close()
    return link, process


def _serve(link: Connection) -> NoReturn:
    """Evaluate what the parent process asks for, until it ends or asks no more."""
    try:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # A connection is closed when no process has it open.
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # or a collection would copy the parent's objects
        evaluate_here()
        while link.poll(IDLE_SECONDS):
            function, arguments = link.recv()
            try:
                found = _limited(function, *arguments)
            except (FinetuneError, jinja2.TemplateError) as error:
                found = error
            link.send(found)
        os._exit(0)
    finally:
        os._exit(1)


def _limited(function: Callable[..., T], *arguments: Any) -> T:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_most(soft), hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # kills: one operation can take hours
        return function(*arguments)
    except _Endless:
        raise _refusal(TOO_SLOW) from None
    except MemoryError:
        raise _refusal(TOO_LARGE) from None
    except FinetuneError:
        raise
    except Exception as error:  # a template can raise anything
        raise jinja2.TemplateError(str(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most(soft: int) -> int:
    """Limit of the address space for a conversation, in bytes."""
    statm = _templates(os.getpid()).statm
    if statm is None:
        return soft
    most = int(os.pread(statm, 100, 0).split()[0]) * resource.getpagesize() + BYTES
    return most if soft == resource.RLIM_INFINITY else min(most, soft)


def _refusal(problem: str) -> FinetuneError:
    return FinetuneError(f"chat template: it {problem}; set model.chat_template to another one")


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Endless
