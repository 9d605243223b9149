"""Run model-generated code in a process with limits, and report the outcome.

The process has no environment variables but TMPDIR, an empty working directory, and limits on time,
memory and files. Code that starts processes, sends signals, opens the network or writes outside the
directory is stopped; `inside` runs and judges it. Where the system allows namespaces (bubblewrap,
or unshare), there is no network and every file outside of the directory is read-only, whatever the
code does; elsewhere only Python's audit hooks say so, and `isolation` tells which of them holds.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.process.signals import end_group

FILE_BYTES, FILES = 2**20, 32
"""Maximum size of a file, and number of open files."""
CHANGES = 256
"""Maximum number of times that files or folders are created or changed."""
PASSED = "passed"


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program."""

    cpu: int = 5
    """Seconds of CPU time."""
    wall: float = 10.0
    """Seconds of wall-clock time."""
    memory: int = 2**30
    """Bytes of address space."""


DEFAULT = Limits()

INSIDE = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program."""

    passed: bool
    said: str
    """`passed`, the raised error, or the limit that was reached."""


def run(program: str, limits: Limits = DEFAULT) -> Outcome:
    """Run a program until it ends or reaches a limit.

    Processes that it started are killed with it.
    """
    told, late = _told(program, limits)
    if late:
        return Outcome(False, f"runs longer than {limits.wall:g} s")
    passed, said, status = told[:3] if told else (False, "", 0)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"computes longer than {limits.cpu} s")
    return Outcome(passed, PASSED if passed else said or "ends before its tests")


def _told(program: str, limits: Limits) -> tuple[Any, bool]:
    """What `inside` reports, and whether it was ended because it took too long."""
    read, write = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="answer-") as folder,
        open(read, "rb", 0) as told,
        open(write, "wb", 0),
    ):
        prefix, binds = _namespaces(folder)
        numbers = (write, limits.cpu, limits.memory, FILE_BYTES, FILES, CHANGES)
        child = [sys.executable, "-IB", str(INSIDE), *map(str, numbers), binds]
        process = subprocess.Popen(
            [*prefix, *child], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd=folder, env={}, pass_fds=(write,),
            start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=limits.wall)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_group(process)
        os.set_blocking(read, False)
        return json.loads(told.read(65_536) or b"null"), late


def _namespaces(folder: str) -> tuple[list[str], str]:
    """Words before a command that give it namespaces, and what these are: of `MOUNTS`, or none."""
    for name, words in _WORDS.items():
        if _works(name):
            return [each.format(folder=folder) for each in words], MOUNTS[name]
    return [], ""


_WORDS = {
    "bwrap": (
        "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev",
        "--proc", "/proc", "--bind", "{folder}", "{folder}", "--chdir", "{folder}", "--",
    ),
    "unshare": ("unshare", "-rnm", "--pid", "--fork", "--kill-child", "--"),
}  # fmt: skip
"""By program: how it starts a command in namespaces of its own, in the order of preference."""
MOUNTS = {"bwrap": "kept", "unshare": "own"}
"""By program: whether it keeps files read-only, or only makes a mount namespace for that."""


@functools.cache
def _works(name: str) -> bool:
    """Whether a program is here and this system lets it make namespaces."""
    true = shutil.which("true")
    if shutil.which(_WORDS[name][0]) is None or true is None:
        return False
    words = [each.format(folder="/tmp") for each in _WORDS[name]]
    return subprocess.run([*words, true], capture_output=True).returncode == 0


@functools.cache
def isolation() -> str:
    """Description of the isolation of programs on this machine, for `results.json`."""
    told, _ = _told("", DEFAULT)
    network = "no network" if _namespaces("")[0] else "network calls refused in Python only"
    files = "other files read-only" if told and told[3] else "writes refused in Python only"
    return f"{DEFAULT.cpu} s, {DEFAULT.memory // 2**30} GiB, {network}, {files}"
