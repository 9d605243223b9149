"""Exchange numbers and objects between ranks, on the host."""

import abc
import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed import PrefixStore, TCPStore

from finetune.errors import FinetuneError, TrainingFailure, of_a_file
from finetune.process import rendezvous
from finetune.process.attributes import changed

T = TypeVar("T")
N = TypeVar("N", int, float)
GRACE_SECONDS = 10.0
"""Seconds in which other ranks find the same problems as one that refuses."""
PATIENCE = datetime.timedelta(days=1)
"""Timeout for work whose duration depends on the user's data."""


class Ranks(abc.ABC):
    """One process of a job, with collectives on the host."""

    control: torch.distributed.ProcessGroup | None
    """Process group for numbers and objects on the host; None for the default group."""

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def world(self) -> int: ...

    @property
    @abc.abstractmethod
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in fp64."""
        return self.sums_and_maxima(values, [])[0]

    def largest(self, values: list[int]) -> list[int]:
        """Element-wise maximum over all ranks."""
        return self.sums_and_maxima([], values)[1]

    def sums_and_maxima(self, summed: list[float], largest: list[N]) -> tuple[list[float], list[N]]:
        """Element-wise sums in fp64 and maxima over all ranks, in one collective on the host.

        Does not synchronize with an accelerator. Integers are exact below 2**53.
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
        """Context with a timeout of one day, for work whose duration depends on the user's data.

        If a rank is lost, the heartbeat still ends the others.
        """
        if self.world == 1:
            yield
            return
        group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        with changed(self, control=group):
            yield

    def from_first(self, value: Any) -> Any:
        """Broadcast the value of rank 0; the values of other ranks are ignored."""
        if self.world == 1:
            return value
        seen = [value]
        torch.distributed.broadcast_object_list(seen, src=0, group=self.control)
        return seen[0]

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0; every rank returns its result, or raises its error."""
        outcome: T | FinetuneError | None = None
        if self.is_main:
            try:
                outcome = work()
            except FinetuneError as error:
                outcome = error
            except OSError as error:
                outcome = TrainingFailure(of_a_file(error) or str(error))
        outcome = self.from_first(outcome)
        if isinstance(outcome, FinetuneError):
            raise outcome
        return outcome  # type: ignore[return-value]

    def gather(self, value: Any, group: torch.distributed.ProcessGroup | None = None) -> list[Any]:
        """Gather the values of all ranks, in order, on every rank; over `group` if given."""
        if self.world == 1:
            return [value]
        ranks: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(ranks, value, group=group or self.control)
        return ranks

    def refusals(self, call: str, mine: list[str]) -> dict[int, list[str]]:
        """Problems that ranks refuse work for, by rank; every rank calls this after the work.

        Exchanged in the rendezvous store, because a rank may wait in the work for one that has left
        it: a rank with problems leaves the others after `GRACE_SECONDS`. One without waits for them
        in a collective, which names a rank that hangs.
        """
        store = PrefixStore(f"finetune/{call}", TCPStore(*rendezvous.meeting_point(), None, False))
        if mine:
            store.append("refused", json.dumps([self.rank, mine]) + "\n")
        if store.add("done", 1) == self.world:
            store.set("all", "")
        until = time.monotonic() + GRACE_SECONDS
        while not any(store.check([each]) for each in ("all", "left")):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        if mine and not store.check(["all"]):
            store.set("left", "")
        elif not store.check(["left"]):
            self.gather(None)
        lines = store.get("refused").splitlines() if store.check(["refused"]) else []
        return dict(map(json.loads, lines))


def group_on_host(device: torch.device) -> torch.distributed.ProcessGroup | None:
    """A gloo group for collectives on the host; None if the default group is on the host already.

    The default group of an accelerator would keep the device busy while a rank waits, wait for all
    queued work of the device, and end the rank after the timeout.
    """
    return None if device.type == "cpu" else torch.distributed.new_group(backend="gloo")
