"""Scratch folders for results that several processes, machines or containers may write."""

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ENDING = ".rows"
LOCK_SECONDS = 30.0
"""Seconds to wait for the cache's lock; a network disk may keep the lock of a dead host."""


@contextlib.contextmanager
def scratch_for(folder: Path) -> Iterator[Path]:
    """Create a new folder next to another one and remove it at the end.

    Scratch folders of dead processes are removed too, with a line on stderr. A writer locks its
    scratch folder, and the system releases the lock when the process ends. Process ids would not
    do, because they are not unique across containers.
    """
    with _opened(folder.parent) as cache:
        if _lock_in_time(cache):
            for old in folder.parent.glob(f".*{ENDING}"):
                _remove_dead(old)
        scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}{ENDING}")
        scratch.mkdir()
        descriptor = os.open(scratch, os.O_RDONLY)
        _lock(descriptor, fcntl.LOCK_EX)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _remove_dead(scratch: Path) -> None:
    """Remove a scratch folder that no process has locked."""
    with contextlib.suppress(OSError), _opened(scratch) as folder:
        if _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(scratch, ignore_errors=True)
            print(f"removed {scratch}: its writer had been killed", file=sys.stderr)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock_in_time(descriptor: int) -> bool:
    until = time.monotonic() + LOCK_SECONDS
    while (locked := _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)) is False:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return bool(locked)


def _lock(descriptor: int, how: int) -> bool | None:
    """Lock a folder; False if another process has locked it, None if the disk has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
