"""Detect lost ranks: each rank publishes a heartbeat with its progress once a second.

The beats go through the store by which the ranks found each other, from a thread, so that they come
while the main thread waits in a collective. They serve three ends: an error of a collective can
name the rank that is gone or behind; a rank that waits for a lost one ends in seconds, whatever its
library does; and a rank whose launcher is gone does not stay behind as an orphan.
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

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Without a beat for so long, a rank of another host counts as gone after a failed collective."""
SILENT_HOST_SECONDS = 60.0
"""Without a beat for so long, the first rank of another host counts as gone at any time."""
GRACE_SECONDS = 5.0
"""How long the main thread may take to report a loss by itself before its process is ended."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
TRANSPORTS = (
    "/gloo/", "NCCL", "caused pair closure", "Connection closed by peer",
    "Connection reset by peer",
)  # fmt: skip
"""What the messages of a failed collective hold: gloo raises a bare RuntimeError (torch 2.13).

Of several collectives that wait for a lost rank, the first says that it timed out, with gloo's file
and line; the others hear of no more than the closed pair.
"""


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    number: int
    step: int
    collectives: int
    """Collectives that it has begun, over all groups; 0 where torch's flight recorder is off."""
    pid: int
    host: str
    place: str
    """Where its main thread was."""


class Heartbeat:
    """This rank's beats, and what it hears of the others; on one process, the orphan's end only."""

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
        """Step that runs, from 1; the loop sets it."""
        self._engine, self._rank, self._world = engine, engine.rank, engine.world
        self._meeting, self._dumps = meeting, dumps
        self._on_orphan, self._on_loss, self._standing = on_orphan, on_loss, standing
        self._main = threading.main_thread().ident
        # One process may outlive the shell that started it; a rank's parent is torch's agent.
        self._parent = os.getppid() if engine.world > 1 else None
        self._launcher = launcher
        self._watched = watched(engine.rank, *rendezvous.among_neighbours(), engine.world)
        self._silence = Silence()
        self._stopped = threading.Event()
        self._number = 0
        self._store: TCPStore | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, on every rank together."""
        if self._world == 1:
            self._thread = threading.Thread(target=self._wait_alone, daemon=True, name="heartbeat")
            self._thread.start()
            return
        # Of this start: a store outlives a restarted job.
        self._prefix = f"finetune/{self._engine.from_first(secrets.token_hex(8))}"
        self._thread = threading.Thread(target=self._live, daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_SECONDS)

    # The thread.

    def _live(self) -> None:
        host, port = self._meeting
        try:
            patience = datetime.timedelta(seconds=10)
            self._store = TCPStore(host, port, is_master=False, timeout=patience)
            while not self._stopped.wait(BEAT_SECONDS if self._number else 0):
                self._beat()
                self._listen()
        except (DistError, RuntimeError):
            pass  # the store is gone; a collective tells the rest
        self._wait_alone()

    def _wait_alone(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._end_as_orphan()

    def _beat(self) -> None:
        assert self._store is not None
        self._number += 1
        told = Beat(
            self._rank, self._number, self.step, collectives_begun(), os.getpid(),
            socket.gethostname(), self._place(),
        )  # fmt: skip
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(dataclasses.asdict(told)))
        self._end_as_orphan()

    def _listen(self) -> None:
        """End this process where a rank was lost and the main thread does not notice."""
        assert self._store is not None
        if not self._store.check([f"{self._prefix}/lost"]):
            lost = self._lost()
            if lost is None:
                return
            self._tell_all(self._describe([lost]))
        message = self._store.get(f"{self._prefix}/lost").decode()
        if not self._stopped.wait(GRACE_SECONDS):
            self._dump()
            self._on_loss(TrainingFailure(message))

    def _lost(self) -> str | None:
        """What became of a rank that this one watches; None while it lives."""
        process, beats = self._watched
        beat = self._read(process)
        if beat is not None and gone_here(beat):
            return f"{name(beat)} ended without a word"
        beat = None if beats is None else self._read(beats)
        if beat is None or self._silence.seconds(beat, time.monotonic()) < SILENT_HOST_SECONDS:
            return None
        return f"{name(beat)} has not been heard of for {SILENT_HOST_SECONDS:g} s"

    def _end_as_orphan(self) -> None:
        gone = self._launcher is not None and has_ended(self._launcher)
        if gone or self._parent not in (None, os.getppid()):
            self._parent, self._launcher = None, None  # asked once
            self._on_orphan()

    def _place(self) -> str:
        """The innermost line of this package that the main thread is in, and where that leads."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        ours = [entry for entry in stack if f"{os.sep}finetune{os.sep}" in entry.filename]
        last = (ours or stack)[-1]
        return f"{Path(last.filename).name}:{last.lineno} in {last.name}"

    # After a collective has failed, in the main thread.

    def tell(self, message: str) -> None:
        """Let the other ranks end with a message of this one."""
        if self._store is not None:
            self._tell_all(message)

    def explain(self, error: BaseException) -> TrainingFailure | None:
        """What a failed collective means: the ranks that are gone, or behind; None for others.

        Takes up to `SILENT_SECONDS`. The flight recorder's dump is kept in the run.
        """
        if self._world == 1 or not is_transport(error):
            self.tell(
                f"rank {self._rank} failed in step {self.step}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; {self._standing()}"
            )
            return None
        self._dump()
        first_line = str(error).strip().splitlines()[0].rsplit("] ", 1)[-1]
        if self._store is None:
            return TrainingFailure(
                f"rank {self._rank} lost the others before step 1: {first_line}; {self._standing()}"
            )
        try:
            told = self._told()
            if told is None:
                told = self._tell_all(self._describe(self._losses()))
        except (DistError, RuntimeError):
            told = (
                f"step {self.step}: the meeting point {self._meeting[0]}:{self._meeting[1]} is "
                f"gone, and with it the host of rank 0; {self._standing()}"
            )
        return TrainingFailure(f"{told} (rank {self._rank} heard: {first_line})")

    def bereaved(self) -> TrainingFailure | None:
        """The loss of another rank of this host, for which torch's agent ends this one."""
        until = time.monotonic() + 2 * BEAT_SECONDS
        while self._store is not None and time.monotonic() < until:
            gone = [f"{name(beat)} ended without a word" for beat in self._read_all()
                    if gone_here(beat)]  # fmt: skip
            if gone:
                return TrainingFailure(self._tell_all(self._describe(gone)))
            time.sleep(0.2)
        return None

    def _told(self) -> str | None:
        if self._store is None or not self._store.check([f"{self._prefix}/lost"]):
            return None
        return self._store.get(f"{self._prefix}/lost").decode()

    def _tell_all(self, message: str) -> str:
        """Publish what happened, once: the first word holds for everybody."""
        assert self._store is not None
        return self._store.compare_set(f"{self._prefix}/lost", "", message).decode() or message

    def _losses(self) -> list[str]:
        """What each lost rank is: gone, silent, or behind the others in its collectives.

        A silent one of this host is ended: it may be stopped, and would hear no signal.
        """
        before = self._read_all()
        gone = [f"{name(beat)} ended without a word" for beat in before if gone_here(beat)]
        if gone:
            return gone
        time.sleep(SILENT_SECONDS)
        now = {beat.rank: beat for beat in self._read_all()}
        silent = [beat for beat in before if now[beat.rank].number == beat.number]
        silent = [beat for beat in silent if beat.rank != self._rank]
        if silent:
            end_here(silent)
            return [f"{name(beat)} no longer answers" for beat in silent]
        most = max(beat.collectives for beat in now.values())
        behind = [b for b in now.values() if b.collectives < most or b.step < self.step]
        return [f"{name(beat)} did not come, it was last at {beat.place}" for beat in behind]

    def _read_all(self) -> list[Beat]:
        found = (self._read(rank) for rank in range(self._world))
        return [beat for beat in found if beat is not None]

    def _read(self, rank: int) -> Beat | None:
        assert self._store is not None
        key = f"{self._prefix}/{rank}"
        return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _describe(self, losses: list[str]) -> str:
        what = " and ".join(losses) or "all ranks still run, but cannot reach each other"
        return f"step {self.step}: {what}; {self._standing()}"

    def _dump(self) -> None:
        """Keep what torch's flight recorder knows of the last collectives of this rank.

        Where it cannot be written, on a full disk, say, the loss itself is still to be told.
        """
        record = flight_record(entries=True)
        if record.get("entries"):
            with contextlib.suppress(OSError):
                write_json(self._dumps / f"rank-{self._rank:05d}.json", record)


def is_transport(error: BaseException) -> bool:
    """Whether a collective failed, and not the work of this rank itself."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in TRANSPORTS)


def name(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host})"


def end_here(beats: list[Beat]) -> None:
    """Kill ranks of this host."""
    for beat in beats:
        if beat.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


def gone_here(beat: Beat) -> bool:
    """Whether a process of this host has ended."""
    return beat.host == socket.gethostname() and has_ended(beat.pid)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def flight_record(entries: bool) -> dict[str, Any]:
    """Torch's flight recorders (TORCH_FR_BUFFER_SIZE > 0): that of gloo, and NCCL's where it is.

    torch 2.13 keeps one for each kind of events; a build without CUDA lacks the second.
    """
    library = torch._C._distributed_c10d
    asked = [getattr(library, name, None) for name in RECORDERS]
    return merged([json.loads(dump(entries, False)) for dump in asked if dump is not None])


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records as one: the first's, with the entries and the groups of all."""
    groups = {
        f"{number}/{name}": group
        for number, record in enumerate(records)
        for name, group in record.get("pg_status", {}).items()
    }
    entries = [entry for record in records for entry in record.get("entries", [])]
    return {**records[0], "pg_status": groups} | ({"entries": entries} if entries else {})


def collectives_begun() -> int:
    """Over all process groups of this rank."""
    groups = flight_record(entries=False)["pg_status"].values()
    return sum(max(0, int(group["last_enqueued_collective"])) for group in groups)


def watched(rank: int, local_rank: int, here: int, world: int) -> tuple[int, int | None]:
    """The rank whose process a rank looks at, and the one whose beats it counts.

    The first is the next of its host, of which it sees the process end. The first rank of a host
    counts the beats of the first rank of the next host, whose processes it cannot see.

    Args:
        here: ranks of its host, which follow one another.
    """
    first = rank - local_rank
    alone = here >= world
    return first + (local_rank + 1) % here, None if alone or local_rank else (first + here) % world


class Silence:
    """How long the beats of a rank have not moved."""

    def __init__(self) -> None:
        self._number, self._since = -1, math.inf

    def seconds(self, beat: Beat, now: float) -> float:
        """Since its last new beat was read; `now` in seconds of a clock that never goes back."""
        if beat.number != self._number:
            self._number, self._since = beat.number, now
        return now - self._since
