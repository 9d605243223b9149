"""The vocabulary of failure: what a person did wrong, and what went wrong while training."""

import difflib
import errno
import os
from collections.abc import Iterable
from pathlib import Path


class FinetuneError(Exception):
    """A person's mistake, or a request that cannot be honoured: exit status 2, no traceback.

    Carries every problem that was found, so that all of them can be mended at once. Each says
    what is wrong, where, what was got, and what to write instead.
    """

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TrainingFailure(FinetuneError):
    """Training was started and could not go on: exit status 1."""

    exit_status = 1


class Interrupted(FinetuneError):
    """A signal asked for the end; what was trained is saved: exit status 75 (EX_TEMPFAIL).

    A scheduler may start the same command again, with `--resume auto`.
    """

    exit_status = 75


def of_a_file(error: OSError) -> str | None:
    """`FILE: Permission denied` and its like; None where no file of a user is to blame.

    An error without a file, and one of a file of this package, is a mistake of the toolkit; but a
    full disk often comes without the name of the file.
    """
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{error.strerror}: a file could not be written"
    if error.strerror is None or not isinstance(error.filename, str | bytes):
        return None
    name = os.fsdecode(error.filename)
    if Path(name).is_relative_to(Path(__file__).parent):
        return None
    return f"{name if len(name) <= LONG else f'{name[:LONG]}...'}: {error.strerror}"


LONG = 400
"""Characters of a file's name that a message shows."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The closest known word as `; did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
