"""Ranks tell each other numbers and objects, on the host."""

import abc
import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from finetune.errors import FinetuneError, TrainingFailure

T = TypeVar("T")
N = TypeVar("N", int, float)
PATIENCE = datetime.timedelta(days=1)
"""How long ranks wait for work whose time depends on the user's data."""


class Ranks(abc.ABC):
    """One process among those of a job."""

    control: torch.distributed.ProcessGroup | None
    """Where ranks tell each other numbers and objects; None for the default group."""

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def world(self) -> int: ...

    @property
    @abc.abstractmethod
    def speaks(self) -> bool:
        """Whether this is rank 0."""

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in fp64."""
        return self.meet(values, [])[0]

    def largest(self, values: list[int]) -> list[int]:
        """Element-wise maximum over all ranks."""
        return self.meet([], values)[1]

    def meet(self, summed: list[float], largest: list[N]) -> tuple[list[float], list[N]]:
        """Element-wise sums in fp64 and maxima over all ranks, in one collective on the host.

        No accelerator has to be waited for. Integers are exact below 2**53.
        """
        if self.world == 1:
            return [float(value) for value in summed], largest
        mine = torch.tensor([*summed, *largest], dtype=torch.float64)
        ranks = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(ranks, mine, group=self.control)
        table = torch.stack(ranks)  # (world, values)
        sums, maxima = table.sum(dim=0), table.amax(dim=0)
        first = len(summed)
        most = zip(largest, maxima[first:].tolist(), strict=True)
        return sums[:first].tolist(), [type(mine)(value) for mine, value in most]

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Let ranks wait for each other for a day: work whose time depends on the user's data.

        The heartbeat still ends them within seconds where one is lost.
        """
        if self.world == 1:
            yield
            return
        usual = self.control
        self.control = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        try:
            yield
        finally:
            self.control = usual

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank; values of the others are not looked at."""
        if self.world == 1:
            return value
        seen = [value]
        torch.distributed.broadcast_object_list(seen, src=0, group=self.control)
        return seen[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0; every rank gets its result, or raises its error."""
        outcome: T | FinetuneError | None = None
        if self.speaks:
            try:
                outcome = work()
            except FinetuneError as error:
                outcome = error
            except OSError as error:
                outcome = TrainingFailure(f"{error.filename}: {error.strerror}")
        outcome = self.from_first(outcome)
        if isinstance(outcome, FinetuneError):
            raise outcome
        return outcome  # type: ignore[return-value]

    def gather(self, value: Any, group: torch.distributed.ProcessGroup | None = None) -> list[Any]:
        """What each rank has, by rank, on every rank; over `group` where one is given."""
        if self.world == 1:
            return [value]
        ranks: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(ranks, value, group=group or self.control)
        return ranks


def group_on_host(device: torch.device) -> torch.distributed.ProcessGroup | None:
    """Where ranks tell each other numbers and objects: a group of gloo, None for the default one.

    On an accelerator the default group is its own library's: a rank that waits in it keeps the
    device busy, waits for all that the device has to do, and is ended after the timeout.
    """
    return None if device.type == "cpu" else torch.distributed.new_group(backend="gloo")
