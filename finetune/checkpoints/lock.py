"""Lock a run directory for one training at a time; check that its ranks share it."""

import contextlib
import fcntl
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from finetune.distributed.ranks import Ranks
from finetune.errors import FinetuneError
from finetune.runs.foreign import refuse_foreign, unusable_directory
from finetune.runs.run import Run
from finetune.runs.units import duration

LOCK_SECONDS = 10.0
"""Seconds to wait for a lock: the processes of a killed run may take a moment to end."""
SECONDS_TO_APPEAR = 10.0
"""Seconds until a network file system shows a new file to every host."""
SHOWN_RANKS = 8


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Lock a run directory; the operating system releases the lock when this process ends.

    On a file system without locks the directory is not locked, and a warning goes to stderr.

    Raises:
        FinetuneError: another process holds the lock, the directory contains something other than
            a run, or it is not writable.
    """
    if not run.recipe.exists():
        refuse_foreign(run.root)
    path = run.root / "run.lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise unusable_directory(run.root, error) from None
    with file:
        until = time.monotonic() + LOCK_SECONDS
        while not _acquired(file.fileno(), path):
            if time.monotonic() > until:
                file.seek(0)
                raise FinetuneError(_locked_message(run, file.read().strip()))
            time.sleep(0.2)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if not run.recipe.exists():  # refused before the record began: leave nothing behind
                path.unlink(missing_ok=True)


def _acquired(descriptor: int, path: Path) -> bool:
    """Whether the lock was acquired, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"warning: {path}: its file system has no locks ({error.strerror}): a second "
              "training in this directory would not be detected", file=sys.stderr)  # fmt: skip
    return True


def _locked_message(run: Run, holder: str) -> str:
    """The message that a directory is locked; for another host, with the time of its last write."""
    text = (
        f"{run.root}: in use by {holder or 'another process'}; wait until it ends, or choose "
        "another --output"
    )
    if not holder or holder.endswith(f" on {socket.gethostname()}"):
        return text
    wrote = [path.stat().st_mtime for path in run.root.iterdir() if path.is_file()]
    return (
        f"{text} (it last wrote {duration(max(0.0, time.time() - max(wrote)))} ago; if that "
        "host is gone, a network disk may keep its lock: delete run.lock)"
    )


def refuse_unshared(run: Run, ranks: Ranks) -> None:
    """Check that rank 0's run directory is that of every rank: each writes its part of checkpoints.

    Raises:
        FinetuneError: on every rank, with the ranks that have another directory of this name.
    """
    token = run.root / ranks.from_first(f".shared-{secrets.token_hex(8)}")
    ranks.on_rank_0(token.touch)
    until = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := token.exists()) and time.monotonic() < until:
        time.sleep(0.2)
    everybody = ranks.gather((socket.gethostname(), seen))
    ranks.on_rank_0(token.unlink)
    apart = [f"rank {rank} on {host}" for rank, (host, seen) in enumerate(everybody) if not seen]
    if apart:
        more = f" and {len(apart) - SHOWN_RANKS} more" if apart[SHOWN_RANKS:] else ""
        raise FinetuneError(
            f"{run.root.absolute()}: {', '.join(apart[:SHOWN_RANKS])}{more} cannot see what rank 0 "
            f"on {everybody[0][0]} writes there; choose an --output on a disk that all hosts share"
        )
