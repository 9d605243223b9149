"""Run commands of `finetune` in forks of one process that has imported everything, with faults.

Reads lines of JSON with the words, the log, the variables of each rank, and a fault: what happens
to one rank at a moment. That is the first time that it opens, makes or renames a file whose path
matches, or `NAME() N`, the N-th call of a function of this name by the main thread.
"""

import errno
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

SECONDS = 120.0
"""Time limit of a command."""
PATIENCE = 2.0
"""Time between SIGTERM and SIGKILL for ranks that another one has left."""
EVENTS = {"open", "os.mkdir", "os.rename"}
RAISED = {"full": errno.ENOSPC, "forbidden": errno.EACCES}
SENT = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hangup": signal.SIGHUP}
CALL = re.compile(r"(\w+)\(\) (\d+)")
RECORDS = "/metrics.jsonl"
"""The file of a run that stays open, so that a full disk meets it at a call."""


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
    import finetune.cli.main as cli
    import finetune.exporters.export
    import finetune.training.worker  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line), cli.main)), flush=True)


def carry_out(job: dict[str, Any], command: Callable[[list[str]], int]) -> int:
    """The exit status of the first rank that ends, below zero where a signal ended it.

    If that one failed, the others are ended by SIGTERM, and by SIGKILL if that has no effect, as
    torch's agent does.
    """
    workers = [start(job, rank, command) for rank in range(len(job["ranks"]))]
    until, status = time.monotonic() + SECONDS, None
    while workers:
        for worker in list(workers):
            ended = os.waitpid(worker, os.WNOHANG)
            if ended == (0, 0):
                continue
            workers.remove(worker)
            if status is None:
                status = os.waitstatus_to_exitcode(ended[1])
                until = until if status == 0 else time.monotonic() + PATIENCE
                for other in workers if status else ():
                    os.kill(other, signal.SIGTERM)
        if time.monotonic() > until:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
        time.sleep(0.005)
    assert status is not None
    return status


def start(job: dict[str, Any], rank: int, command: Callable[[list[str]], int]) -> int:
    """The process id of a rank."""
    return os.fork() or run(job, rank, command)


def run(job: dict[str, Any], rank: int, command: Callable[[list[str]], int]) -> NoReturn:
    status = 1
    try:
        os.environ.update(job["ranks"][rank])
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job["fault"] and rank == job["faulty_rank"]:
            suffer(*job["fault"], Path(job["log"]).with_suffix(".met"))
        status = command(job["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def suffer(fault: str, moment: str, met: Path) -> None:
    """Let the fault happen: a signal once, an error at each matching file."""
    if call := CALL.fullmatch(moment):
        at_call(call[1], int(call[2]), lambda: strike(fault, met))
    else:
        at_files(moment, fault, met)


def at_files(pattern: str, fault: str, met: Path) -> None:
    once = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal once
        if event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        if not re.search(pattern, path) or (once and fault not in RAISED):
            return
        once = True
        if fault not in RAISED:
            strike(fault, met)
            return
        met.touch()
        raise OSError(RAISED[fault], os.strerror(RAISED[fault]), path)

    sys.addaudithook(hook)


def at_call(name: str, number: int, act: Callable[[], None]) -> None:
    left = number

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_name == name:
            left -= 1
            if not left:
                sys.setprofile(None)
                act()

    sys.setprofile(profile)


def strike(fault: str, met: Path) -> None:
    met.touch()
    if fault in SENT:
        os.kill(os.getpid(), SENT[fault])
    elif fault == "hang":
        time.sleep(1e9)
    elif fault == "stuck":
        send_later(signal.SIGTERM)
        time.sleep(1e9)
    else:
        fill_disk()


def send_later(number: int) -> None:
    """Send a signal to this process after `PATIENCE`, while it hangs."""
    waiting = os.getpid()
    if not os.fork():
        time.sleep(PATIENCE)
        os.kill(waiting, number)
        os._exit(0)


def fill_disk() -> None:
    """Let the next record of the run meet a full disk."""
    (records,) = [each for each in Path("/proc/self/fd").iterdir() if leads_to(each, RECORDS)]
    os.dup2(os.open("/dev/full", os.O_WRONLY), int(records.name))


def leads_to(link: Path, ending: str) -> bool:
    try:
        return os.readlink(link).endswith(ending)
    except OSError:  # of the listing itself
        return False


if __name__ == "__main__":
    main()
