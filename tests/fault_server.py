"""Run commands of `finetune` in forks of one process that has imported everything, with faults.

Reads lines of JSON with the words, the log, the variables of each rank, and a fault: what happens
to one rank the first time that it opens, makes or renames a file whose path matches.
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
from typing import Any, NoReturn

SECONDS = 120.0
"""Time limit of a command."""
PATIENCE = 3.0
"""Time between SIGTERM and SIGKILL for ranks that another one has left."""
EVENTS = {"open", "os.mkdir", "os.rename"}
RAISED = {"full": errno.ENOSPC, "forbidden": errno.EACCES}
SENT = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hangup": signal.SIGHUP}


def main() -> None:
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


def suffer(fault: str, pattern: str, met: Path) -> None:
    """Let the fault happen: a signal once, an error at each matching file."""
    once = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal once
        if event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        if not re.search(pattern, path) or (once and fault in SENT):
            return
        if not once:
            once = True
            met.touch()
        if fault == "hang":
            time.sleep(1e9)
        elif fault in SENT:
            os.kill(os.getpid(), SENT[fault])
        else:
            raise OSError(RAISED[fault], os.strerror(RAISED[fault]), path)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
