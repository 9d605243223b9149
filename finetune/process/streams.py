"""Keep a process running when its standard output or error fails: closed pipe, full disk, hangup.

A training has its record in the run directory. A missing reader of its output is not a reason to
end, and even less to end half-way with an exit status of success.
"""

import io
import os
import sys
from typing import Any


class _RedirectedStream(io.RawIOBase):
    """A file descriptor that is redirected to the null device after the first failed write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        try:
            return os.write(self._descriptor, content)
        except BlockingIOError:
            raise
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)  # also for writes of libraries and child processes
            os.close(nowhere)
            _report(self._descriptor, error)
            return len(memoryview(content).cast("B"))


def _report(descriptor: int, error: OSError) -> None:
    """Report a failed stream on the other stream."""
    name = "standard output" if descriptor == 1 else "standard error"
    words = f"{name}: {error.strerror}; the work continues, and its record is written\n"
    stream = sys.stderr if descriptor == 1 else sys.stdout
    if stream is not None:
        stream.write(words)
        stream.flush()


def outlast_readers() -> None:
    """Keep this process from failing when its output or error stream is gone.

    Streams that a notebook or a test has replaced are not changed.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        if stream.fileno() == descriptor:
            raw: Any = _RedirectedStream(descriptor)
            lasting = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            stream.flush()
            setattr(sys, name, lasting)
