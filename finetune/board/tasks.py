"""The tasks that a board started, and those that wait: their folders are the only memory of it.

    RUNS/.board/tasks/ID/     see `finetune.board.detached`
    RUNS/.board/queue.lock    held while devices are given to tasks: several boards may look

A task runs in a session of its own. It does not notice when the board ends, and the next board
finds it by its files.
"""

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from finetune.board.devices import Device, Need, devices
from finetune.errors import FinetuneError
from finetune.process import interpreter
from finetune.runs.run import read_object, write_json, write_whole
from finetune.runs.standing import holder_of

State = Literal["queued", "paused", "running", "finished", "interrupted", "failed", "cancelled"]
Words = dict[str, list[str]]
"""The fields of a form or the words of an address, by name."""
INTERRUPTED = 75
CANCELLED = -1000
"""Status of a task that was cancelled before it began."""
SECONDS_TO_START = 20.0
LONGEST_LOG = 32 * 1024
"""Bytes of the end of a log that are shown."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command with its folder."""

    folder: Path
    verb: str
    words: list[str]
    run: str = ""
    """Name of the run that it belongs to."""
    job: str = ""
    """Id of the job of the API that it belongs to."""
    log: Path
    need: Need
    place: str
    """The folder in which it works."""
    created: float
    end: dict[str, Any] = field(default_factory=dict[str, Any])
    """What `ended.json` says, once it is there."""

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def command(self) -> str:
        """The command to copy."""
        return command(self.words)

    @property
    def started(self) -> dict[str, Any]:
        return read_object(self.folder / "started.json")

    @property
    def ended(self) -> dict[str, Any]:
        if not self.end:
            self.end.update(read_object(self.folder / "ended.json"))
        return self.end

    @property
    def given(self) -> list[Device]:
        """The devices that it has."""
        return [Device(**each) for each in read_object(self.folder / "given.json").get("on", ())]

    @property
    def state(self) -> State:
        ended = self.ended
        if ended:
            known: dict[Any, State] = {
                0: "finished", INTERRUPTED: "interrupted", CANCELLED: "cancelled",
                -signal.SIGTERM: "interrupted",
            }  # fmt: skip
            return known.get(ended.get("status"), "failed")
        if holder_of(self.folder / "lock") is not None:
            return "running"
        if (self.folder / "started.json").is_file():
            return "failed"  # its session was killed, or the machine was switched off
        return "paused" if (self.folder / "paused").exists() else "queued"

    @property
    def is_open(self) -> bool:
        """Whether it runs or waits."""
        return not self.ended and self.state in ("queued", "paused", "running")

    def last_words(self) -> list[str]:
        """The last lines of its output."""
        return tail(self.log)


def command(words: Sequence[str]) -> str:
    """A command of the toolkit, quoted for a shell."""
    return shlex.join(["finetune", *words])


def tail(path: Path) -> list[str]:
    """The last lines of a log; of a line that was rewritten, its last text."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LOG))
        text = file.read().decode("utf-8", "replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        return lines[1 if size > LONGEST_LOG else 0 :]
    return []


def first(words: Words, name: str, absent: str = "") -> str:
    """The first value of a field."""
    return words.get(name, [absent])[0].strip()


class Tasks:
    """The tasks of a folder of runs."""

    def __init__(self, folder: Path) -> None:
        """`folder`: that of the runs."""
        self.home = folder / ".board"
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._known: dict[str, Task] = {}

    def all(self) -> list[Task]:
        """Every task, the newest first; folders that are no tasks are left out."""
        try:
            names = sorted(os.listdir(self.home / "tasks"), reverse=True)
        except OSError:
            return []
        found = list[Task]()
        for name in names:
            if name not in self._known:
                folder = self.home / "tasks" / name
                with contextlib.suppress(FinetuneError, ValueError):
                    known = {**read_object(folder / "task.json"), "folder": folder}
                    self._known[name] = TypeAdapter(Task).validate_python(known)
            if name in self._known:
                found.append(self._known[name])
        return found

    def of(self, run: str) -> list[Task]:
        return [task for task in self.all() if task.run == run]

    def find(self, id: str) -> Task | None:
        return next((task for task in self.all() if task.id == id), None)

    def add(
        self, verb: str, words: list[str], run: str = "", log: Path | None = None,
        need: Need | None = None, job: str = "",
    ) -> Task:  # fmt: skip
        """Queue a command; `advance` starts it. Raises OSError, for example if the disk is full."""
        folder = self.home / "tasks" / f"{time.time_ns() // 1000:017d}-{secrets.token_hex(4)}"
        task = Task(
            folder=folder, verb=verb, words=words, run=run, job=job, need=need or Need(),
            log=(log or folder / "log").resolve(), place=str(Path.cwd()), created=time.time(),
        )  # fmt: skip
        write_json(folder / "task.json", to_jsonable_python(task))
        return task

    def stop(self, task: Task) -> None:
        """Save and stop a task that runs, or take one that waits out of the queue."""
        with self._alone():
            if task.state in ("queued", "paused"):
                write_json(task.folder / "ended.json", {"status": CANCELLED, "time": time.time()})
                return
        pid = task.started.get("pid")
        if task.state == "running" and isinstance(pid, int):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def hold(self, task: Task, *, paused: bool) -> None:
        """Keep a waiting task from starting, or let it start."""
        if paused:
            write_whole(task.folder / "paused", "")
        else:
            (task.folder / "paused").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "queue.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def advance(self) -> None:
        """Start the tasks for which there is room, oldest first.

        A job that does not fit beside those that run waits, and those behind it too: a small job
        never overtakes a large one for ever.
        """
        self._children = [child for child in self._children if child.poll() is None]
        if not any(task.state == "queued" for task in self.all() if not task.ended):
            return
        with self._alone():
            tasks = [(task, task.state) for task in reversed(self.all()) if not task.ended]
            taken: dict[Device, int] = {}
            for task, state in tasks:
                if state == "running":
                    _take(taken, task, task.given)
            here = devices()
            for task, state in tasks:
                if state == "queued":
                    chosen = task.need.on(here, taken)
                    if chosen is None:
                        break
                    self._start(task, chosen)
                    _take(taken, task, chosen)

    def _start(self, task: Task, chosen: Sequence[Device]) -> None:
        given = [dataclasses.asdict(each) for each in chosen]
        write_json(task.folder / "given.json", {"on": given})
        child = subprocess.Popen(
            interpreter.python("-m", "finetune.board.detached", str(task.folder.resolve())),
            env=interpreter.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._children.append(child)
        until = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < until and task.state == "queued" and child.poll() is None:
            time.sleep(0.02)
        if task.state == "queued":
            write_json(task.folder / "ended.json", {"status": 1, "time": time.time()})


def _take(taken: dict[Device, int], task: Task, given: Sequence[Device]) -> None:
    each = task.need.bytes * (task.need.processes if given and given[0].kind == "cpu" else 1)
    for device in given:
        taken[device] = taken.get(device, 0) + each
