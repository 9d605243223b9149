"""Standard output and error that outlast their reader: a closed pipe, a full disk, a terminal gone.

What trains has its record in the run directory; that nobody reads its display any more is no reason
to end, and still less to end half-way with the status of success.
"""

import io
import os
import sys
from typing import Any


class _Lasting(io.RawIOBase):
    """A file descriptor that turns to the null device with the first write that fails."""

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
            os.dup2(nowhere, self._descriptor)  # what libraries and other processes write as well
            os.close(nowhere)
            _tell(self._descriptor, error)
            return len(memoryview(content).cast("B"))


def _tell(descriptor: int, error: OSError) -> None:
    """Say once, on the other stream, that one is gone."""
    name = "standard output" if descriptor == 1 else "standard error"
    words = f"{name}: {error.strerror}; the work goes on, and its record is written\n"
    stream = sys.stderr if descriptor == 1 else sys.stdout
    if stream is not None:
        stream.write(words)
        stream.flush()


def outlast_readers() -> None:
    """Let this process write to its output and error streams without an end when those are gone.

    Streams that were put in their place by a notebook or a test stay as they are.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        if stream.fileno() == descriptor:
            raw: Any = _Lasting(descriptor)
            lasting = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            stream.flush()
            setattr(sys, name, lasting)
