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
        self.problems = tuple(one_line(problem) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), self.problems  # between processes too, each problem is a line


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
LONGEST = 4000
"""Characters of a problem that are told, whatever it quotes."""


def one_line(problem: str) -> str:
    """A problem in one line that a terminal shows as it is, its middle left out where it is long.

    Names, values and errors of libraries come from files of strangers: they hold line ends, half
    characters, and codes that would move a terminal's cursor.
    """
    if len(problem) > LONGEST:
        cut = LONGEST // 2
        left = f" [{len(problem) - 2 * cut:,} characters left out] "
        problem = problem[:cut] + left + problem[-cut:]
    if problem.isprintable():
        return problem
    words = " ".join(line.strip() for line in problem.splitlines() if line.strip())
    return "".join(
        each if each.isprintable() else repr(each)[1:-1] for each in words.replace("\t", " ")
    )


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The closest known word as `; did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
