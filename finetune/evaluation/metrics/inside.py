"""Run a program from standard input and judge it: the process that `sandbox.run` starts.

It forks the process of the program, and alone says whether that passed: where the program comes to
its end, C functions write a word that is drawn here. They run in a thread of their own, so the
program has no frame of this file above it, and the word is in no module.
"""

import _thread
import ctypes
import json
import operator
import os
import resource
import sys
import time
import types
from functools import partial
from typing import Any, NoReturn

NETWORK = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
    "socket.gethostbyname", "socket.gethostbyaddr",
)  # fmt: skip
PROCESSES = (
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
    "subprocess.Popen", "pty.spawn", "_thread.start_new_thread",
)  # fmt: skip
INSPECTION = (
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames",
    "sys._current_exceptions",
)  # fmt: skip
CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree",
)  # fmt: skip
REFUSED = {
    **dict.fromkeys(NETWORK, "opens the network"),
    **dict.fromkeys(PROCESSES, "starts a process"),
    **dict.fromkeys(("os.kill", "os.killpg"), "sends a signal"),
    **dict.fromkeys(INSPECTION, "inspects the interpreter"),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
BIND, MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY, PRIVATE = 4096, 442, -100, 0x8000, 1, 1 << 18
"""Numbers of Linux (mount(2), mount_setattr(2)); the system call is 5.12 and later."""
MOST_SAID = 1_000


def main() -> None:
    report, cpu, memory, size, files, most_changes = map(int, sys.argv[1:7])
    home = os.path.realpath(os.getcwd())
    os.environ.clear()
    os.environ["TMPDIR"] = home
    mounts = sys.argv[7]
    files_kept = mounts == "kept" or (mounts == "own" and protects_files(home))
    program = sys.stdin.read()
    word = os.urandom(16)
    said_here, said_there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report)
        os.close(said_here)
        limits = {"CPU": cpu, "AS": memory, "FSIZE": size, "NOFILE": files, "CORE": 0}
        for name, most in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        run(program, word, said_there, home, most_changes)
    os.close(said_there)
    said = end = b""
    while piece := os.read(said_here, MOST_SAID):
        said, end = (said + piece)[:MOST_SAID], (end + piece)[-len(word) :]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = end == word, said.decode("utf-8", "replace"), status, files_kept
    os.write(report, json.dumps(told).encode())


def protects_files(home: str) -> bool:
    """Make all files read-only, except those in a folder; in a mount namespace of its own only."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mount"):
        return False

    def change(path: str, flags: int, attributes: tuple[int, int, int, int]) -> bool:
        values = (ctypes.c_uint64 * 4)(*attributes)
        given = (MOUNT_SETATTR, HERE, os.fsencode(path), flags, ctypes.byref(values), 32)
        return libc.syscall(*given) == 0

    kept = (
        libc.mount(os.fsencode(home), os.fsencode(home), None, BIND, None) == 0
        and change("/", RECURSIVE, (READ_ONLY, 0, PRIVATE, 0))
        and change(home, 0, (0, READ_ONLY, 0, 0))
    )
    os.chdir(home)  # the working directory is still the folder below the mount
    return kept


def run(program: str, word: bytes, out: int, home: str, most_changes: int) -> NoReturn:
    """Run a program, and write the word if it comes to its end."""

    def tell(what: str) -> None:
        os.write(out, what.encode("utf-8", "replace")[:MOST_SAID])

    def failed(about: Any) -> None:
        name, text = about.exc_type.__name__, str(about.exc_value)[:200]
        tell("fills its memory" if name == "MemoryError" else f"{name}: {text}".rstrip(": "))

    try:
        compiled = compile(program, "answer", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        tell(f"{type(error).__name__}: {error}")
        os._exit(1)
    sys.unraisablehook = failed
    namespace = sys.modules["__main__"] = types.ModuleType("__main__")
    steps = partial(exec, compiled, vars(namespace)), partial(os.write, out, word)
    begin = _thread.allocate_lock()
    begin.acquire()
    _thread.start_new_thread(list, (map(operator.call, (begin.acquire, *steps)),))
    sys.addaudithook(watcher(home, most_changes, tell))
    while not _thread._count():  # it has not started
        time.sleep(0.001)
    begin.release()
    while _thread._count():
        time.sleep(0.002)
    os._exit(0)


def watcher(home: str, most_changes: int, tell: Any) -> Any:
    """An audit hook that ends the process where the program does what is refused."""
    changes, closed, free = 0, os._exit, (home + "/", "/dev/")

    def is_outside(path: object) -> bool:
        if type(path) is int or path is None:
            return False
        if type(path) not in (str, bytes):  # its methods would run inside of this one
            return True
        found = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return found != home and not found.startswith(free)

    def watch(event: str, given: tuple[Any, ...]) -> None:
        nonlocal changes
        what = REFUSED.get(event)
        opens = event == "open" and given[2] & WRITES
        if opens or event in CHANGES:
            changes += 1
            if any(map(is_outside, given[: 1 if opens else 2])):
                what = "writes outside its folder"
            elif changes > most_changes:
                what = "writes too many files"
        if what:
            tell(what)
            closed(3)

    return watch


if __name__ == "__main__":
    main()
