"""The last words of a process that ends with an error: to its launcher, or on the terminal."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from finetune import backend
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.runs.run import write_json

STATUS_FILE = "FINETUNE_STATUS_FILE"
"""Variable that names the file in which a worker leaves its error for the launcher."""

AGENTS_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable in which torch's agent names the file for the error of one worker."""

SECONDS_FOR_THE_FIRST = 15
"""How long another rank waits with a mistake that the first one should find as well."""


def tell(error: FinetuneError) -> int:
    """Say what is wrong once: to the launcher where there is one, else from one rank.

    Without a launcher of ours torch's agent ends all processes when it sees the first one end. A
    mistake that every rank finds is told by rank 0: the others wait for their end meanwhile, and
    speak only where none comes, because rank 0 does not find it (another machine, another disk).

    Returns:
        The exit status.
    """
    rank = backend.rank()
    if leave(error) or (rank and isinstance(error, Interrupted)):
        return error.exit_status
    if rank and not isinstance(error, TrainingFailure):
        time.sleep(SECONDS_FOR_THE_FIRST)
    place = f" [rank {rank}]" if rank else ""
    for problem in error.problems:
        print(f"error{place}: {problem}", file=sys.stderr, flush=True)
    _to_agent(error)
    return error.exit_status


def _to_agent(error: FinetuneError) -> None:
    """Have torch's agent, whose report is the last that a person sees, end it with the error."""
    path = os.environ.get(AGENTS_FILE)
    if path is not None:
        words = "\n".join(f"error: {problem}" for problem in error.problems)
        told = {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # a full disk, say: it is told on the terminal
            write_json(Path(path), {"message": told})


def leave(error: FinetuneError) -> bool:
    """Leave the error for the launcher to tell; False where that cannot be done.

    The first error of an attempt stays: what other ranks hear after it are its consequences. Only
    an interruption, by which torch's agent ends the others, gives way.
    """
    path = os.environ.get(STATUS_FILE)
    if path is None:
        return False
    told = _left(Path(path))
    first = told is not None and told["attempt"] == backend.restarts()
    if told is not None and first and told["status"] != Interrupted.exit_status:
        return True
    left = {"attempt": backend.restarts(), "status": error.exit_status}
    try:
        write_json(Path(path), left | {"problems": list(error.problems)})
    except OSError:  # a full disk, say: it is told on the terminal
        return False
    return True


def _left(path: Path) -> dict[str, Any] | None:
    """What a rank has left for the launcher."""
    try:
        return json.loads(path.read_text())
    except OSError:
        return None


def forget_earlier_attempts() -> None:
    """In a worker that was started again: an earlier attempt's error is not this one's."""
    path = Path(os.environ.get(STATUS_FILE, ""))
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        if path.is_file() and json.loads(path.read_text())["attempt"] < backend.restarts():
            path.unlink()
