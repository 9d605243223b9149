"""Report a worker's error to the launcher, or print it if there is none."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.process import rendezvous
from finetune.runs.run import write_json

STATUS_FILE = "FINETUNE_STATUS_FILE"
"""Environment variable with the file in which a worker leaves its error for the launcher."""

AGENTS_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable in which torch's agent names the file for a worker's error."""

SECONDS_FOR_THE_FIRST = 15
"""Seconds that other ranks wait before reporting a mistake that rank 0 should find as well."""


def report(error: FinetuneError) -> int:
    """Report an error once: to the launcher if there is one, otherwise from one rank.

    Without our launcher, torch's agent ends all processes when the first one ends. A mistake that
    every rank finds is reported by rank 0. The other ranks wait to be ended, and report it only if
    that does not happen because rank 0 did not find it (another machine, another disk).

    Returns:
        The exit status.
    """
    rank = rendezvous.rank()
    if write_for_launcher(error) or (rank and isinstance(error, Interrupted)):
        return error.exit_status
    if rank and not isinstance(error, TrainingFailure):
        time.sleep(SECONDS_FOR_THE_FIRST)
    place = f" [rank {rank}]" if rank else ""
    for problem in error.problems:
        print(f"error{place}: {problem}", file=sys.stderr, flush=True)
    _to_agent(error)
    return error.exit_status


def _to_agent(error: FinetuneError) -> None:
    """Write the error for torch's agent, whose report is the last thing that the user sees."""
    path = os.environ.get(AGENTS_FILE)
    if path is not None:
        words = "\n".join(f"error: {problem}" for problem in error.problems)
        content = {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # for example a full disk; the terminal has the error
            write_json(Path(path), {"message": content})


def write_for_launcher(error: FinetuneError) -> bool:
    """Write the error to the file for the launcher; False if that is not possible.

    The first error of an attempt is kept, because later errors of other ranks are consequences of
    it. Only an interruption is replaced, since torch's agent ends the other ranks by a signal.
    """
    path = os.environ.get(STATUS_FILE)
    if path is None:
        return False
    earlier = _read_error(Path(path))
    first = earlier is not None and earlier["attempt"] == rendezvous.restarts()
    if earlier is not None and first and earlier["status"] != Interrupted.exit_status:
        return True
    left = {"attempt": rendezvous.restarts(), "status": error.exit_status}
    try:
        write_json(Path(path), left | {"problems": list(error.problems)})
    except OSError:  # for example a full disk; `tell` prints the error instead
        return False
    return True


def _read_error(path: Path) -> dict[str, Any] | None:
    """The error that a rank has written for the launcher; None if there is none."""
    try:
        return json.loads(path.read_text())
    except OSError:
        return None


def forget_earlier_attempts() -> None:
    """Delete the error of an earlier attempt, in a worker that was restarted."""
    path = Path(os.environ.get(STATUS_FILE, ""))
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        if path.is_file() and json.loads(path.read_text())["attempt"] < rendezvous.restarts():
            path.unlink()
