"""Scratch folders of a cache that several processes, machines or containers share."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ENDING = ".rows"
LOCK_SECONDS = 30.0
"""How long a cache's lock is waited for: a network disk may keep that of a host that is gone."""


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A new folder beside another one, removed at the end; those of processes that died go too.

    Whoever writes holds a lock on its scratch folder, which the system releases when the process
    ends, in whichever container: process numbers are not unique over those. What another version
    left under a process number is not touched.
    """
    with _opened(folder.parent) as cache:
        if _lock_in_time(cache):
            for old in folder.parent.glob(f".*{ENDING}"):
                _remove_dead(old)
        scratch = Path(tempfile.mkdtemp(ENDING, f".{folder.name}.", folder.parent))
        scratch.chmod(0o777 & ~_umask())
        held = os.open(scratch, os.O_RDONLY)
        _lock(held, fcntl.LOCK_EX)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)


def _remove_dead(scratch: Path) -> None:
    """Remove a scratch folder that no process holds."""
    with contextlib.suppress(OSError), _opened(scratch) as folder:
        if _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock_in_time(descriptor: int) -> bool:
    until = time.monotonic() + LOCK_SECONDS
    while not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _lock(descriptor: int, how: int) -> bool:
    """Lock a folder; False where another process holds it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before
