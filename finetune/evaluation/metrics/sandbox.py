"""Run model-generated code in a process with limits, and report the outcome.

The process has no environment variables but TMPDIR, an empty working directory, and limits on time,
memory and files. Python code that starts processes, sends signals, opens the network or writes
outside the directory is stopped; the network is unavailable if the system allows namespaces. This
protects against accidents; it is not a security boundary against attackers.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

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

CHILD = """
import json, os, resource, sys
report = os.fdopen(int(sys.argv[1]), "w")
cpu, memory, file, files, most_changes = map(int, sys.argv[2:])
changes = 0
code = sys.stdin.read()
def tell(outcome):
    report.write(json.dumps(outcome)); report.flush()
class Refused(BaseException):
    pass
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
           "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
PROCESSES = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
             "subprocess.Popen", "pty.spawn", "_thread.start_new_thread")
SIGNALS = ("os.kill", "os.killpg")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
           "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr",
           "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
home = os.environ["TMPDIR"] = os.path.realpath(os.getcwd())
def outside(path):
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    found = os.path.realpath(os.fsdecode(path))
    return found != home and not found.startswith((home + "/", "/dev/"))
def watch(event, arguments):
    global changes
    said = None
    if event in CHANGES or (event == "open" and arguments[2] & WRITES):
        changes += 1
        if any(map(outside, arguments[: 1 if event == "open" else 2])):
            said = "writes outside its folder"
        elif changes > most_changes:
            said = "writes too many files"
    for names, what in ((NETWORK, "opens the network"), (PROCESSES, "starts a process"),
                        (SIGNALS, "sends a signal")):
        if event in names:
            said = what
    if said:
        tell(said); os._exit(3)
def limit(kind, most):
    resource.setrlimit(kind, (most, most))
limit(resource.RLIMIT_CPU, cpu)
limit(resource.RLIMIT_AS, memory)
limit(resource.RLIMIT_FSIZE, file)
limit(resource.RLIMIT_NOFILE, files)
limit(resource.RLIMIT_CORE, 0)
compiled = None
try:
    compiled = compile(code, "answer", "exec")
    sys.addaudithook(watch)
    exec(compiled, {"__name__": "__main__"})
except MemoryError:
    compiled = code = None
    tell("fills its memory")
except SystemExit:
    tell("ends before its tests")
except BaseException as error:
    tell(type(error).__name__ + (": " + str(error)[:200] if str(error) else ""))
else:
    tell("passed")
os._exit(0)
"""
"""The program that runs an answer, which it reads from standard input; it reports to a pipe."""


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
    with tempfile.TemporaryDirectory(prefix="answer-") as folder, _pipe() as (read, write):
        numbers = (write, limits.cpu, limits.memory, FILE_BYTES, FILES, CHANGES)
        child = [sys.executable, "-IB", "-c", CHILD, *map(str, numbers)]
        words = [*_without_network(), *child]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=folder, env={}, pass_fds=(write,), start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=limits.wall)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_group(process)
        os.set_blocking(read, False)
        with contextlib.suppress(BlockingIOError):
            return _outcome(os.read(read, 65_536), process.returncode, late, limits)
        return _outcome(b"", process.returncode, late, limits)


def _outcome(output: bytes, status: int, late: bool, limits: Limits) -> Outcome:
    if late:
        return Outcome(False, f"runs longer than {limits.wall:g} s")
    if status in (-signal.SIGXCPU, -signal.SIGKILL, 128 + signal.SIGKILL, 128 + signal.SIGXCPU):
        return Outcome(False, f"computes longer than {limits.cpu} s")
    with contextlib.suppress(ValueError):
        outcome = json.loads(output)
        if isinstance(outcome, str):
            return Outcome(outcome == PASSED and status == 0, outcome)
    return Outcome(False, f"ends before its tests (status {status})")


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


@functools.cache
def _without_network() -> tuple[str, ...]:
    """Command prefix that starts a process without a network; empty without namespaces."""
    found = shutil.which("unshare")
    words = (found, "-rn") if found else ()
    true = shutil.which("true")
    if not words or true is None:
        return ()
    allowed = subprocess.run([*words, true], capture_output=True, env={}).returncode == 0
    return words if allowed else ()


def isolation() -> str:
    """Description of the isolation of programs on this machine, for `results.json`."""
    network = "no network" if _without_network() else "network calls refused in Python only"
    return f"{DEFAULT.cpu} s, {DEFAULT.memory // 2**30} GiB, {network}"
