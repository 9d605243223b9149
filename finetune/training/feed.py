"""What a step needs, made in a thread while the step before it runs."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Feed(Generic[T]):
    """Things by the number of their step, one of them made ahead.

    `make` must be a function of the step alone: whatever was made ahead is what would have been
    made in time, and what is not asked for is dropped.
    """

    def __init__(self, make: Callable[[int], T], stop: int, thread: ThreadPoolExecutor) -> None:
        self._make, self._stop, self._thread = make, stop, thread
        self._ahead: tuple[int, Future[T]] | None = None

    def take(self, step: int) -> T:
        """What `make` gives for a step, or raises; that of the next step is begun.

        Nothing is begun from step `stop` on.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            made = ahead[1].result()
        else:
            made = self._thread.submit(self._make, step).result()
        if step + 1 < self._stop:
            self._ahead = step + 1, self._thread.submit(self._make, step + 1)
        return made


@contextlib.contextmanager
def feed(make: Callable[[int], T], stop: int, device: torch.device) -> Iterator[Feed[T]]:
    """A feed whose thread ends with it, and works on `device` where that is a GPU."""

    def begin() -> None:
        if device.type == "cuda":  # a new thread begins on the first GPU
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(1, "feed", initializer=begin) as thread:
        try:
            yield Feed(make, stop, thread)
        finally:
            thread.shutdown(cancel_futures=True)
