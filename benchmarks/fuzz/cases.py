"""Fuzzing cases: each is generated from a seed, a subject and a number, run, and judged."""

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
"""Maximum CPU seconds of a case, which usually takes milliseconds; templates may take 4 s."""
WALL_SECONDS = 300
"""Maximum wall-clock seconds of a case, for a machine with other load; more is a hang."""
BYTES = 6 << 30
"""Bytes of address space that a case may add to the process; a template may use 2 GiB of them."""
LONGEST = 20_000
"""Maximum characters of an error message."""


class Hung(BaseException):
    """A case exceeded its time limit."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A case that ended neither with success nor with a proper error message."""

    subject: str
    number: int
    file: str
    kind: str
    """Type of the error and its last line in this package: equal for the same cause."""
    told: str

    def __str__(self) -> str:
        return f"{self.subject} {self.number} ({self.file}): {self.kind}: {self.told}"


def generator(seed: int, subject: str, number: int) -> random.Random:
    return random.Random(f"{seed} {subject} {number}")


class Originals:
    """The original contents of a subject's files, with the metadata of unchanged files."""

    def __init__(self, subject: Subject) -> None:
        self.contents = {file: file.read_bytes() for file in subject.files}
        self._unchanged = {file: _looks(file) for file in self.contents}

    def put_back(self) -> None:
        """Restore the original contents; untouched files are not read."""
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
    """Inode, size and modification time of a file; None if it does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def run_case(
    name: str, subject: Subject, seed: int, number: int, originals: Originals | None = None
) -> Fault | str:
    """Change a file, read it, and restore it; returns a fault, or `read` or `refused`."""
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
    except BaseException as error:  # panics of Rust libraries do not subclass Exception
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
    """Context manager that limits time and address space; limits of templates are lower."""

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
    """Outcomes of the cases of one subject."""

    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """CPU seconds of all cases."""
    slowest: float = 0.0
    """CPU seconds of the slowest case."""

    def add(self, end: Fault | str, seconds: float) -> None:
        """Count a case with its outcome."""
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
    """Redirect stderr to /dev/null, to hide the output of libraries."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
