"""Read lines of UTF-8 text files, compressed or not."""

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from finetune.errors import FinetuneError


def _open_with_arrow(path: Path, mode: str) -> IO[bytes]:
    """Decompress bzip2 or zstandard; Python's bz2 ends silently at bytes that are no stream."""
    import pyarrow  # slow to import

    kind = {".bz2": "bz2", ".zst": "zstd"}[path.suffix.lower()]
    raw: Any = pyarrow.input_stream(str(path), compression=kind)
    return io.BufferedReader(raw)


COMPRESSED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": _open_with_arrow,
    ".xz": lzma.open,
    ".zst": _open_with_arrow,
}
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
"""Suffixes of archive files."""
MAGIC = {
    b"\x1f\x8b": "compressed with gzip; rename it to end in .gz",
    b"BZh": "compressed with bzip2; rename it to end in .bz2",
    b"\xfd7zXZ\x00": "compressed with xz; rename it to end in .xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard; rename it to end in .zst",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; rename it to end in .parquet",
    b"ARROW1": "an Arrow file; rename it to end in .arrow",
}
"""Magic bytes of other kinds of files."""


class NotUTF8(ValueError):
    """A line is not UTF-8; the message says how to convert the file."""


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield lines with their line ends, split at newlines only.

    Raises FinetuneError for a file that cannot be decompressed, is of another kind, or is encoded
    in units of two or four bytes.
    """
    opener: Callable[..., Any] = COMPRESSED.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file):
                if number == 0:
                    _check_kind(path, line)
                yield line
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if opener is open:
            raise
        raise FinetuneError(f"{path}: it cannot be decompressed: {error}") from None


def _check_kind(path: Path, line: bytes) -> None:
    for magic, kind in MAGIC.items():
        if line.startswith(magic):
            raise FinetuneError(f"{path}: it is {kind}")
    encoding = _wide_encoding(line)
    if encoding is not None:
        raise FinetuneError(
            f"{path} row 1: not UTF-8 but {encoding}; convert it: iconv -f {encoding} -t UTF-8"
        )


def _wide_encoding(line: bytes) -> str | None:
    """The encoding if it has units of two or four bytes, judged by the BOM or the zero bytes."""
    if line.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    zeros = line.count(0) / max(1, len(line))
    if zeros < 0.4:
        return None
    return ("UTF-32" if zeros > 0.6 else "UTF-16") + ("BE" if line[0] == 0 else "LE")


def decode(line: bytes, is_first: bool) -> str:
    """Decode a line; drops a byte order mark from the first line. Raises NotUTF8."""
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise NotUTF8(
            f"not UTF-8 (byte {error.start} of the line is 0x{line[error.start]:02x}); convert it "
            "from its encoding, as in iconv -f LATIN1 -t UTF-8"
        ) from None


def lines(path: Path) -> Iterator[str]:
    """Yield lines with their line ends; raises FinetuneError at the first that is not UTF-8."""
    for number, line in enumerate(raw_lines(path), 1):
        try:
            yield decode(line, number == 1)
        except NotUTF8 as problem:
            raise FinetuneError(f"{path} row {number}: {problem}") from None
