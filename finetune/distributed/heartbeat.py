"""Detect lost ranks: each rank publishes a heartbeat with its progress once a second.

A thread publishes the beats in the rendezvous store, so they continue while the main thread waits
in a collective. They serve three purposes: the error of a collective names the rank that is gone or
behind; a rank that waits for a lost one exits within seconds, whatever its library does; and a rank
whose launcher is gone does not remain as an orphan.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch.distributed import DistError, TCPStore

from finetune.distributed.base import Engine
from finetune.errors import TrainingFailure
from finetune.process import rendezvous
from finetune.runs.run import write_json

UNREACHABLE = (DistError, RuntimeError)
"""Errors of the rendezvous store after the process that serves it has ended."""
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Seconds without a beat after which a rank counts as gone, if a collective has failed."""
SILENT_HOST_SECONDS = 60.0
"""Seconds without a beat after which the first rank of another host always counts as gone."""
STALLED_SECONDS = 60.0
"""Seconds without a new step or collective after which a rank that others wait for is reported with
a rank that is gone: NCCL's watchdog aborts the ranks that wait, not the one that hangs."""
WAITING_SECONDS = 10.0
"""Seconds without a step or collective after which a file names the ranks that others wait for."""
GRACE_SECONDS = 5.0
"""Seconds for the main thread to report a loss itself before its process is ended."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
TRANSPORTS = (
    "/gloo/", "NCCL", "caused pair closure", "Connection closed by peer",
    "Connection reset by peer",
)  # fmt: skip
"""Texts in the errors of failed collectives: gloo raises a plain RuntimeError (torch 2.13).

If several collectives wait for a lost rank, the first reports a timeout with gloo's file and line;
the others report only the closed pair.
"""


@dataclasses.dataclass(frozen=True)
class Beat:
    """The last published state of a rank."""

    rank: int
    number: int
    step: int
    collectives: int
    """Collectives that it has begun in all groups; 0 if torch's flight recorder is off."""
    pid: int
    host: str
    place: str
    """Location of its main thread in the code."""
    stalled: float = 0.0
    """Seconds since it began a step or a collective."""


class Heartbeat:
    """Publish this rank's beats and watch others; for one process, only detect a lost launcher."""

    def __init__(
        self,
        engine: Engine,
        meeting: tuple[str, int],
        launcher: int | None,
        dumps: Path,
        on_orphan: Callable[[], None],
        on_loss: Callable[[TrainingFailure], None],
        standing: Callable[[], str],
    ) -> None:
        self.step = 0
        """Current step, from 1; set by the loop."""
        self._engine, self._rank, self._world = engine, engine.rank, engine.world
        self._meeting, self._dumps = meeting, dumps
        self._on_orphan, self._on_loss, self._standing = on_orphan, on_loss, standing
        self._main = threading.main_thread().ident
        # A single process may outlive its shell; the parent of a rank is torch's agent.
        self._parent = os.getppid() if engine.world > 1 else None
        self._launcher = launcher
        self._watched = watched(engine.rank, *rendezvous.local_rank_and_count(), engine.world)
        self._silence, self._progress = Unchanged(), Unchanged()
        self._stopped = threading.Event()
        self._number, self._stalled, self._late = 0, 0.0, list[str]()
        self._store: TCPStore | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; every rank must call this."""
        if self._world == 1:
            self._thread = threading.Thread(target=self._wait_alone, daemon=True, name="heartbeat")
            self._thread.start()
            return
        # A new prefix for each start, because the store survives restarts.
        self._prefix = f"finetune/{self._engine.from_first(secrets.token_hex(8))}"
        self._thread = threading.Thread(target=self._live, daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_SECONDS)

    # In the thread.

    def _live(self) -> None:
        host, port = self._meeting
        try:
            patience = datetime.timedelta(seconds=10)
            self._store = TCPStore(host, port, is_master=False, timeout=patience)
            while not self._stopped.wait(BEAT_SECONDS if self._number else 0):
                self._beat()
                self._listen()
                if self._rank == 0:
                    self._name_late()
        except UNREACHABLE:
            pass  # the store is gone; a failing collective will report it
        self._wait_alone()

    def _wait_alone(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._end_as_orphan()

    def _beat(self) -> None:
        assert self._store is not None
        self._number += 1
        collectives = collectives_begun()
        self._stalled = self._progress.seconds((self.step, collectives), time.monotonic())
        beat = Beat(
            self._rank, self._number, self.step, collectives, os.getpid(), socket.gethostname(),
            self._place(), self._stalled,
        )  # fmt: skip
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(dataclasses.asdict(beat)))
        self._end_as_orphan()

    def _listen(self) -> None:
        """End this process if a rank was lost and the main thread does not report it."""
        message = self._published()
        if message is None:
            lost = self._lost()
            if lost is None:
                return
            message = self._publish(self._describe([lost, *stalled(self._read_all())]))
        if not self._stopped.wait(GRACE_SECONDS):
            self._dump()
            self._on_loss(TrainingFailure(message))

    def _name_late(self) -> None:
        """Write which ranks the others wait for, for whoever watches the run."""
        waits = self._stalled >= WAITING_SECONDS
        late = stalled(self._read_all(), WAITING_SECONDS) if waits else []
        if late != self._late:
            self._late = late
            with contextlib.suppress(OSError):
                write_json(self._dumps / "waiting.json", {"ranks": late})

    def _lost(self) -> str | None:
        """Description of a lost rank among those that this rank watches; None if there is none."""
        process, beats = self._watched
        beat = self._read(process)
        if beat is not None and (gone := ended([beat])):
            return gone[0]
        beat = None if beats is None else self._read(beats)
        if beat is None:
            return None
        if self._silence.seconds(beat.number, time.monotonic()) < SILENT_HOST_SECONDS:
            return None
        return f"{name(beat)} has sent no heartbeat for {SILENT_HOST_SECONDS:g} s"

    def _end_as_orphan(self) -> None:
        gone = self._launcher is not None and has_ended(self._launcher)
        if gone or self._parent not in (None, os.getppid()):
            self._parent, self._launcher = None, None  # asked once
            self._on_orphan()

    def _place(self) -> str:
        """File, line and function of the innermost frame of this package in the main thread."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        ours = [entry for entry in stack if f"{os.sep}finetune{os.sep}" in entry.filename]
        last = (ours or stack)[-1]
        return f"{Path(last.filename).name}:{last.lineno} in {last.name}"

    # In the main thread, after a collective has failed.

    def report_failure(self, message: str) -> None:
        """Publish a message with which the other ranks end, if the store can still be reached."""
        if self._store is not None:
            with contextlib.suppress(*UNREACHABLE):
                self._publish(message)

    def explain(self, error: BaseException) -> TrainingFailure | None:
        """Explain a failed collective by the ranks that are gone or behind; None for other errors.

        Takes up to `SILENT_SECONDS`. Saves the flight recorder's dump in the run.
        """
        if self._world == 1 or not is_transport(error):
            self.report_failure(
                f"rank {self._rank} failed in step {self.step}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; {self._standing()}"
            )
            return None
        self._dump()
        first_line = str(error).strip().splitlines()[0].rsplit("] ", 1)[-1]
        if self._store is None:
            return TrainingFailure(
                f"rank {self._rank} lost the other ranks before step 1: {first_line}; "
                f"{self._standing()}"
            )
        try:
            message = self._published()
            if message is None:
                message = self._publish(self._describe(self._losses()))
        except UNREACHABLE:
            message = self._unreachable()
        return TrainingFailure(f"{message} (seen by rank {self._rank}: {first_line})")

    def lost_local_rank(self) -> TrainingFailure | None:
        """The loss of a rank of this host, if it is why torch's agent terminates this rank."""
        until = time.monotonic() + 2 * BEAT_SECONDS
        while self._store is not None and time.monotonic() < until:
            try:
                beats = self._read_all()
                if gone := ended(beats):
                    losses = [*gone, *stalled(beats)]
                    return TrainingFailure(self._publish(self._describe(losses)))
            except UNREACHABLE:
                return TrainingFailure(self._unreachable())
            time.sleep(0.2)
        return None

    def _unreachable(self) -> str:
        return (
            f"step {self.step}: the rendezvous store at {self._meeting[0]}:{self._meeting[1]} on "
            f"the host of rank 0 cannot be reached; {self._standing()}"
        )

    def _published(self) -> str | None:
        if self._store is None or not self._store.check([f"{self._prefix}/lost"]):
            return None
        return self._store.get(f"{self._prefix}/lost").decode()

    def _publish(self, message: str) -> str:
        """Publish a failure; returns the first published message, which all ranks use."""
        assert self._store is not None
        return self._store.compare_set(f"{self._prefix}/lost", "", message).decode() or message

    def _losses(self) -> list[str]:
        """Describe the lost ranks: gone, silent, or behind the others in their collectives.

        Silent ranks of this host are killed: they may be stopped, and would not handle a signal.
        """
        before, until = self._read_all(), time.monotonic() + SILENT_SECONDS
        while not (gone := ended(before)) and time.monotonic() < until:
            time.sleep(0.1)  # a process closes its connections before it has ended
        if gone:
            return gone
        now = {beat.rank: beat for beat in self._read_all()}
        silent = [beat for beat in before if now[beat.rank].number == beat.number]
        silent = [beat for beat in silent if beat.rank != self._rank]
        if silent:
            end_here(silent)
            return [f"{name(beat)} no longer responds" for beat in silent]
        most = max(beat.collectives for beat in now.values())
        behind = [b for b in now.values() if b.collectives < most or b.step < self.step]
        return [
            f"{name(beat)} did not join the collective; it was last at {beat.place}"
            for beat in behind
        ]

    def _read_all(self) -> list[Beat]:
        found = (self._read(rank) for rank in range(self._world))
        return [beat for beat in found if beat is not None]

    def _read(self, rank: int) -> Beat | None:
        assert self._store is not None
        key = f"{self._prefix}/{rank}"
        return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _describe(self, losses: list[str]) -> str:
        what = " and ".join(losses) or "all ranks still run but cannot reach each other"
        return f"step {self.step}: {what}; {self._standing()}"

    def _dump(self) -> None:
        """Save the flight recorder's entries on the last collectives of this rank.

        A failed write, such as on a full disk, is ignored so that the loss is still reported.
        """
        record = flight_record(entries=True)
        if record.get("entries"):
            with contextlib.suppress(OSError):
                write_json(self._dumps / f"rank-{self._rank:05d}.json", record)


def is_transport(error: BaseException) -> bool:
    """Whether an error comes from a failed collective rather than from this rank's own work."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in TRANSPORTS)


def name(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host})"


def ended(beats: list[Beat]) -> list[str]:
    """Descriptions of the ranks of this host that have ended."""
    return [f"{name(beat)} ended without an error message" for beat in beats if gone_here(beat)]


def stalled(beats: list[Beat], seconds: float = STALLED_SECONDS) -> list[str]:
    """Descriptions of running ranks that have long not joined a collective that others began."""
    most = max((beat.collectives for beat in beats), default=0)
    return [
        f"{name(beat)} did not join a collective for {beat.stalled:.0f} s; it was last at "
        f"{beat.place}"
        for beat in beats
        if beat.collectives < most and beat.stalled >= seconds and not gone_here(beat)
    ]


def end_here(beats: list[Beat]) -> None:
    """Kill the ranks among `beats` that run on this host."""
    for beat in beats:
        if beat.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


def gone_here(beat: Beat) -> bool:
    """Whether a rank ran on this host and has ended."""
    return beat.host == socket.gethostname() and has_ended(beat.pid)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def flight_record(entries: bool) -> dict[str, Any]:
    """Merged dump of torch's flight recorders for gloo and NCCL (TORCH_FR_BUFFER_SIZE > 0).

    torch 2.13 has one for each type of event; a build without CUDA lacks the second.
    """
    library = torch._C._distributed_c10d
    asked = [getattr(library, name, None) for name in RECORDERS]
    return merged([json.loads(dump(entries, False)) for dump in asked if dump is not None])


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge records: the first one, with the entries and the groups of all."""
    groups = {
        f"{number}/{name}": group
        for number, record in enumerate(records)
        for name, group in record.get("pg_status", {}).items()
    }
    entries = [entry for record in records for entry in record.get("entries", [])]
    return {**records[0], "pg_status": groups} | ({"entries": entries} if entries else {})


def collectives_begun() -> int:
    """Number of collectives that this rank has begun in all its process groups."""
    groups = flight_record(entries=False)["pg_status"].values()
    return sum(max(0, int(group["last_enqueued_collective"])) for group in groups)


def watched(rank: int, local_rank: int, here: int, world: int) -> tuple[int, int | None]:
    """The rank whose process a rank watches, and the rank whose beats it watches, or None.

    The first is the next rank of its host, whose process it can see. The first rank of a host also
    watches the beats of the first rank of the next host, whose processes it cannot see.

    Args:
        rank: Global rank.
        local_rank: Rank on its host.
        here: Number of ranks on its host, which are consecutive.
        world: Number of ranks of the job.
    """
    first = rank - local_rank
    alone = here >= world
    return first + (local_rank + 1) % here, None if alone or local_rank else (first + here) % world


class Unchanged:
    """Measures the time since a value last changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = math.inf

    def seconds(self, value: object, now: float) -> float:
        """Seconds since another value was given; `now` is the time of a monotonic clock."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since
