"""Handle signals of a scheduler, a keyboard or a closed terminal: end in order, or at once.

After the first signal the current step is completed; then the loop saves and raises `Interrupted`.
A second signal ends the process, even while Python waits inside a library: a thread receives
signals through `signal.set_wakeup_fd`, which does not depend on the main thread. While progress is
saved only SIGINT does: a scheduler repeats its signals, a person presses Ctrl-C twice.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from finetune.errors import Interrupted
from finetune.process.rendezvous import rank

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
    """Signals that this process handles: `nohup` makes it ignore a closed terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


def requeue_on_sigterm() -> None:
    """End with status 75 on SIGTERM, until other handlers stand: libraries load for seconds.

    The process ends at once, as an exception during an import may be caught by a library. Rank 0
    says so for its job: torch's agent ends the other ranks of a job that reports a mistake.
    """

    def end(number: int, _: FrameType | None) -> None:
        text = f"error: interrupted by {name_of(number)} before the training began: nothing to save"
        if rank() == 0:
            os.write(2, f"{text}\n".encode())
        os._exit(Interrupted.exit_status)

    signal.signal(signal.SIGTERM, end)


def name_of(number: int) -> str:
    """Name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process in a session of its own, with the programs that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


SECONDS_OF_ONE_REQUEST = 3.0
"""Seconds within which a repeated signal counts as the same request: a scheduler signals every
process of a job, and the launcher and torch's agent forward their signals as well."""

SECONDS_OUTSIDE_A_STEP = 10.0
"""Seconds for the main thread to react to a signal while there is nothing to save."""


class Interruption:
    """Handle signals inside this context. Outside the main thread it does nothing.

    with Interruption() as interruption:
        ...                       # a signal raises Interrupted here: there is nothing to save
        interruption.defer()
        ...                       # a signal only sets `asked` here
    """

    def __init__(self) -> None:
        self.asked = False
        self._name = "a signal"
        self.deferring = self.saving = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def name(self) -> str:
        """Name of the received signal, for a message."""
        return self._name

    def defer(self) -> None:
        """From now on, a signal only sets `asked`."""
        self.deferring = True

    def request(self, reason: str) -> None:
        """Request an orderly end without a signal, for example from another thread."""
        self._name, self.asked = reason, True

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._hear, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._waker_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in handled_signals()}
        threading.Thread(target=self._end_at_second, daemon=True, name="signals").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._waker_before)
        self._wake.close()  # ends the thread
        self._before = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self._name, self.asked = self.asked, signal.Signals(number).name, True
        if not self.deferring and not again:
            raise Interrupted(f"interrupted by {self._name} outside a step: nothing new to save")

    def _end_at_second(self) -> None:
        first: tuple[int, float] | None = None
        with self._hear:
            while True:
                try:
                    numbers = self._hear.recv(16)
                except TimeoutError:
                    if not self.deferring:  # waiting in a library, for example for a lost rank
                        os._exit(Interrupted.exit_status)
                    self._hear.settimeout(None)
                    continue
                if not numbers:
                    return
                asking = [number for number in numbers if number in SIGNALS]
                if not asking:  # another signal, for example of a timer
                    continue
                for number in asking:
                    now = time.monotonic()
                    first = first or (number, now)
                    repeated = number != first[0] or now > first[1] + SECONDS_OF_ONE_REQUEST
                    if repeated and not (self.saving and number != signal.SIGINT):
                        os._exit(Interrupted.exit_status)
                self._hear.settimeout(SECONDS_OUTSIDE_A_STEP)
