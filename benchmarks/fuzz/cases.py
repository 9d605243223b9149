"""Cases of a fuzz: each is made from a seed, a subject and a number, and its end is judged."""

import contextlib
import dataclasses
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benchmarks.fuzz.subjects import Subject
from finetune.errors import FinetuneError

SECONDS = 30
"""Processor time of a case, which takes milliseconds; a template alone may take four of them."""
WALL_SECONDS = 300
"""Time of a case on a machine with other work; more is a hang."""
BYTES = 6 << 30
"""Address space that a case may take besides what the process has; a template has 2 GiB of it."""
LONGEST = 20_000
"""Characters of one problem that is told."""


class Hung(BaseException):
    """The time of a case is over."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A case that ended otherwise than with success or a told mistake."""

    subject: str
    number: int
    file: str
    kind: str
    """The error's type and the place in this package where it left it: equal for one cause."""
    told: str

    def __str__(self) -> str:
        return f"{self.subject} {self.number} ({self.file}): {self.kind}: {self.told}"


def generator(seed: int, subject: str, number: int) -> random.Random:
    return random.Random(f"{seed} {subject} {number}")


class Originals:
    """The content of a subject's files, and how each of them looks while it has that content."""

    def __init__(self, subject: Subject) -> None:
        self.contents = {file: file.read_bytes() for file in subject.files}
        self._unchanged = {file: _looks(file) for file in self.contents}

    def put_back(self) -> None:
        """Give files the content that they had; those that nobody touched are not read."""
        for file, content in self.contents.items():
            if _looks(file) == self._unchanged[file]:
                continue
            if not file.exists():  # a damaged checkpoint was set aside
                aside = file.parent.with_name(f"damaged-{file.parent.name}")
                if aside.is_dir():
                    aside.rename(file.parent)
            if not file.is_file() or file.read_bytes() != content:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self._unchanged[file] = _looks(file)


def _looks(file: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of the last change of a file; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def run_case(
    name: str, subject: Subject, seed: int, number: int, originals: Originals | None = None
) -> Fault | str:
    """Make a case, read it, and put the file back; returns how it ended: a fault, or a word."""
    originals = originals or Originals(subject)
    rng = generator(seed, name, number)
    path = rng.choice(list(subject.files))
    path.write_bytes(subject.change(rng, path.name, originals.contents[path]))
    subject.finish(rng, path)
    try:
        with limits():
            subject.read(path)
        return "read"
    except FinetuneError as error:
        long = [problem for problem in error.problems if len(problem) > LONGEST]
        if long or not error.problems or not all(map(str.strip, error.problems)):
            return _fault(name, number, path, AssertionError(f"told in {len(str(error))} letters"))
        if any("\n" in problem.strip() for problem in error.problems):
            return _fault(name, number, path, AssertionError(f"several lines: {error}"))
        return "refused"
    except SystemExit as error:
        return "refused" if error.code == 2 else _fault(name, number, path, error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library in Rust panics with one that is no Exception
        return _fault(name, number, path, error)
    finally:
        originals.put_back()


def _fault(name: str, number: int, path: Path, error: BaseException) -> Fault:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/finetune/" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    told = str(error)[:300].encode("utf-8", "replace").decode()
    return Fault(name, number, path.name, f"{type(error).__name__} at {place}", told)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Within it, time and address space end; a template's own limits lie below them."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hung(signal.Signals(number).name)

    before = [(each, signal.signal(each, end)) for each in (signal.SIGALRM, signal.SIGPROF)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for each, handler in before:
            signal.signal(each, handler)


@dataclasses.dataclass
class Outcome:
    """What became of the cases of one subject."""

    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """Processor time of all of them."""
    slowest: float = 0.0
    """That of the case that took longest."""

    def add(self, end: Fault | str, seconds: float) -> None:
        """Count a case that ended so."""
        self.seconds, self.slowest = self.seconds + seconds, max(self.slowest, seconds)
        if isinstance(end, Fault):
            self.faults.append(end)
            end = "wrong"
        self.ends[end] += 1

    @property
    def cases(self) -> int:
        return self.ends.total()


def run_cases(name: str, subject: Subject, seed: int, numbers: range) -> Outcome:
    """Run cases of a subject in this process."""
    found, originals = Outcome(), Originals(subject)
    for number in numbers:
        begun = time.process_time()
        end = run_case(name, subject, seed, number, originals)
        found.add(end, time.process_time() - begun)
    return found


def quiet_process() -> None:
    """Keep what libraries write from the terminal; told is the outcome."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
