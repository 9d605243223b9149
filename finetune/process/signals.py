"""Signals of a scheduler, a keyboard or a closed terminal: end in order, at once if asked again.

The first signal lets the step that runs come to its end; the loop then saves and raises
`Interrupted`. A second one ends the process, even where Python waits inside a library: a thread
hears of signals through `signal.set_wakeup_fd`, which needs no turn of the main thread.
"""

import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from finetune.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those that this process heeds: under `nohup` a closed terminal is to be ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


SECONDS_OF_ONE_REQUEST = 3.0
"""A scheduler signals every process of a job, and the launcher and torch's agent pass on what they
get: the same signal within so long is the same request."""

SECONDS_OUTSIDE_A_STEP = 10.0
"""How long a signal may take to be heard by the main thread where there is nothing to save."""


class Interruption:
    """Within it, the signals are heard by this process. Outside the main thread it does nothing.

    with Interruption() as interruption:
        ...                       # a signal raises Interrupted here: there is nothing to save
        interruption.defer()
        ...                       # a signal is remembered in `asked` here
    """

    def __init__(self) -> None:
        self.asked = False
        self._name = "a signal"
        self.deferring = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def name(self) -> str:
        """The signal that was heard, for a message."""
        return self._name

    def defer(self) -> None:
        """From here on a signal is only remembered."""
        self.deferring = True

    def request(self, reason: str) -> None:
        """Ask for an orderly end without a signal, such as from another thread."""
        self._name, self.asked = reason, True

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._hear, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._waker_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in heeded()}
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
                    if not self.deferring:  # it waits in a library: for a lost rank, say
                        os._exit(Interrupted.exit_status)
                    self._hear.settimeout(None)
                    continue
                if not numbers:
                    return
                asking = [number for number in numbers if number in SIGNALS]
                if not asking:  # a timer's, say
                    continue
                for number in asking:
                    now = time.monotonic()
                    first = first or (number, now)
                    if number != first[0] or now > first[1] + SECONDS_OF_ONE_REQUEST:
                        os._exit(Interrupted.exit_status)
                self._hear.settimeout(SECONDS_OUTSIDE_A_STEP)
