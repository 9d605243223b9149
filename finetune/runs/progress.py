"""Read how far a run is, from the files that it writes anyway, while it writes them.

    watch = Watch(Run(folder))
    watch.read()        # reads what was appended since the last call
    watch.state, watch.step, watch.loss, watch.seconds_left

Nothing here changes a run. Memory is bounded: steps are counted, and only the last is kept.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from finetune.runs.run import Run, objects
from finetune.runs.standing import holder, is_run

State = Literal[
    "not started", "starting", "running", "finished", "stopped early", "interrupted", "killed"
]
"""`starting`: before its first record. `killed`: it ended without a record of its end."""
ENDS: dict[Any, State] = {
    "finished": "finished", "early stop": "stopped early", "interrupted": "interrupted",
}  # fmt: skip
"""State of a run that nothing trains in, by the reason of its last record."""
BLOCK = 1 << 18
"""Bytes that are read at once."""
STEP = b'{"kind": "train"'
"""Start of the line of a step."""
MOST_RECORDS = 4096
"""Records of a kind other than steps that are kept."""
RECENT = 200
"""Steps between two times from which the time left is estimated."""


class Appended:
    """Reads the complete lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode: a resumed run replaces its metrics."""
        self.offset = 0
        """Bytes that were read."""

    def blocks(self) -> Iterator[tuple[bool, bytes]]:
        """Blocks of complete lines, each with whether the file begins again with it.

        A damaged file gives its bytes as they are, a file that cannot be read none.
        """
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            place = (status.st_dev, status.st_ino)
            again = place != self._file or status.st_size < self.offset
            if again:
                self._file, self.offset = place, 0
            file.seek(self.offset)
            kept = b""
            while read := file.read(BLOCK):
                whole, newline, kept = (kept + read).rpartition(b"\n")
                self.offset += len(whole) + len(newline)  # before: the caller may stop here
                if newline or again:
                    yield again, whole + newline
                    again = False


def _no_steps(block: bytes) -> Iterator[bytes]:
    """The lines of a block that are not of steps; this reads a gigabyte in a second or two."""
    for number, part in enumerate((b"\n" + block).split(b"\n" + STEP)):
        if number == 0 or part.count(b"\n"):
            yield from part.split(b"\n")[1:]


class Watch:
    """A run as its records say, kept up to date by `read`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._appended = Appended(run.metrics)
        self._reset()
        self.locked = False

    def _reset(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        """The last step."""
        self.evaluations: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []
        """Warnings and skipped steps."""
        self.measured: dict[str, Any] = {}
        """The last comparison of memory with the plan."""
        self.end: dict[str, Any] | None = None
        self._recent: list[tuple[float, int]] = []

    def read(self) -> "Watch":
        """Read what is new; returns itself."""
        self.locked = holder(self.run) is not None
        for again, block in self._appended.blocks():
            if again:
                self._reset()
            self._take(block)
        return self

    def _take(self, block: bytes) -> None:
        for record in objects(_no_steps(block)):
            match record.get("kind"):
                case "start":
                    self.end, self._recent = None, []
                    _keep(self.starts, record)
                case "eval":
                    _keep(self.evaluations, record)
                case "save":
                    _keep(self.saved, record)
                case "skip" | "warning":
                    _keep(self.warnings, record)
                case "memory":
                    self.measured = record
                case "end":
                    self.end = record
                case _:
                    pass
        at = block.rfind(STEP)
        for record in objects([block[at:].partition(b"\n")[0]] if at >= 0 else []):
            self.last = record
            if isinstance(record.get("time"), int | float):
                self._recent.append((float(record["time"]), self.step))
                while len(self._recent) > 2 and self.step - self._recent[1][1] >= RECENT:
                    del self._recent[0]

    @property
    def start(self) -> dict[str, Any]:
        """The last record of a start; empty before it."""
        return self.starts[-1] if self.starts else {}

    @property
    def state(self) -> State:
        if self.locked:
            return "running" if self.start and self.end is None else "starting"
        if self.end is not None and (known := ENDS.get(self.end.get("reason"))):
            return known
        return "killed" if self.start else "not started"

    @property
    def step(self) -> int:
        return _whole(self.last.get("step"))

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 before it started."""
        return _whole(self.start.get("steps"))

    @property
    def loss(self) -> float:
        """Loss of the last step, NaN without one."""
        return _number(self.last.get("loss"))

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest loss."""
        finite = [each for each in self.evaluations if math.isfinite(_number(each.get("loss")))]
        return min(finite, key=lambda each: each["loss"], default=None)

    @property
    def updated(self) -> float:
        """Unix time of the last record; 0 without one."""
        records = (self.start, self.last, *self.evaluations[-1:], self.end or {})
        return max(_number(each.get("time"), 0.0) for each in records)

    @property
    def peak_memory(self) -> int:
        """Peak bytes, maximum over processes."""
        return max(_whole(each.get(name)) for each, name in (
            (self.last, "memory"), (self.end or {}, "peak_memory"),
        ))  # fmt: skip

    @property
    def seconds_left(self) -> float:
        """Estimate from the last steps, evaluations included; NaN if nothing runs."""
        if self.state != "running" or not self.last:
            return math.nan
        first = self._recent[0] if len(self._recent) > 1 else (
            _number(self.start.get("time")), _whole(self.start.get("step"))
        )  # fmt: skip
        made = self.step - first[1]
        rate = (_number(self.last.get("time")) - first[0]) / made if made > 0 else math.nan
        return rate * (self.steps - self.step)


def _keep(kept: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Append a record; of very many, every second one is dropped."""
    kept.append(record)
    if len(kept) > MOST_RECORDS:
        del kept[1:-1:2]


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any, absent: float = math.nan) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known else absent


DEEPEST = 3
"""Folders below the given one in which runs are searched."""


def find_runs(folder: Path) -> list[Run]:
    """The runs in a folder and in the folders inside it, or the folder itself, by their names.

    Folders of other tools, links and hidden folders are left out; what cannot be read, too.
    """

    def inside(place: Path, depth: int) -> Iterator[Run]:
        run = Run(place)
        if is_run(place) or (depth and run.recipe.is_file()):
            yield run
        elif depth < DEEPEST:
            with contextlib.suppress(OSError):
                for each in sorted(place.iterdir()):
                    if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
                        yield from inside(each, depth + 1)

    return list(inside(folder, 0))
