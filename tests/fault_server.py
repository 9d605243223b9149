"""Run commands of `finetune` in forks of one process that has imported everything, with faults.

Reads lines of JSON with the words, the variables, the log, and a fault: what happens to the process
the first time that it opens, makes or renames a file whose path matches.
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
    """The exit status of a command, below zero where a signal ended it."""
    worker = os.fork()
    if not worker:
        run(job, command)
    until = time.monotonic() + SECONDS
    while (ended := os.waitpid(worker, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(worker, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def run(job: dict[str, Any], command: Callable[[list[str]], int]) -> NoReturn:
    status = 1
    try:
        os.environ.update(job["env"])
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job["fault"]:
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
        if fault in SENT:
            os.kill(os.getpid(), SENT[fault])
        else:
            raise OSError(RAISED[fault], os.strerror(RAISED[fault]), path)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
