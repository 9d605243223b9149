"""Prepare the next step's batches in a thread while the current step runs."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Feed(Generic[T]):
    """Items by step number, with the next one prefetched.

    `make` must depend on the step alone, so that a prefetched item equals one made on demand.
    A prefetched item of another step than the one taken is dropped.
    """

    def __init__(self, make: Callable[[int], T], stop: int, thread: ThreadPoolExecutor) -> None:
        self._make, self._stop, self._thread = make, stop, thread
        self._ahead: tuple[int, Future[T]] | None = None

    def take(self, step: int) -> T:
        """The item of `step`, or the error of `make`; starts to prefetch the next step.

        Steps from `stop` on are not prefetched.
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
    """A feed with its own thread, which ends with the context and uses `device` if a GPU."""

    def begin() -> None:
        if device.type == "cuda":  # a new thread starts on the first GPU
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(1, "feed", initializer=begin) as thread:
        try:
            yield Feed(make, stop, thread)
        finally:
            thread.shutdown(cancel_futures=True)
