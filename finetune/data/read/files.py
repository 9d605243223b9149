"""Read rows of files, by their suffix. A reader yields (row number, row).

Text files are UTF-8, compressed or not. A row that cannot be read is yielded as `Unreadable` if the
rows after it are still readable.
"""

import codecs
import csv
import dataclasses
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from finetune.data.read.arrow import File, read_arrow, read_parquet, size_of
from finetune.data.values import Unreadable, parse_json
from finetune.errors import FinetuneError

DOCUMENT_END = "<|endoftext|>"
"""The line that separates documents in a text file, as in published corpora."""
EXCERPT = 2000
"""Characters of an unreadable row that are kept."""
SKIP = 1 << 20
"""Bytes that are read at a time on the way to a place."""

NumberedRow = tuple[int, Any]


@dataclasses.dataclass
class Place:
    """Where a reader is in a file; reading goes on from there."""

    row: int = 0
    """Number of the last row that was read."""
    byte: int = 0
    """Bytes of the lines that were read, decompressed; 0 for a format that is not read by lines."""


class BrokenText(ValueError):
    """A text is not UTF-8 or not JSON; the message has the position of the error."""


def read_jsonl(path: File, place: Place | None = None) -> Iterator[NumberedRow]:
    place = place or Place()
    is_first = not place.row
    for number, raw in enumerate(raw_lines(path, place), place.row + 1):
        try:
            line = decode(raw, number == 1).strip()
            if not line:
                continue
            row = _parse(line)
        except BrokenText as problem:
            text = raw.decode("utf-8", "replace").strip()
            if is_first:
                _check_shape(path, text)
            row = Unreadable(str(problem), text[:EXCERPT])
        if is_first and isinstance(row, list) and any(map(_is_row, row)):
            _check_shape(path, "[")
        is_first = False
        yield number, row


def _is_row(value: Any) -> bool:
    """Whether a value of a list may be a row; turns of a conversation are not rows."""
    return isinstance(value, dict) and value.keys().isdisjoint(("role", "from"))


def _check_shape(path: File, first: str) -> None:
    """Refuse a file whose first line shows that it does not have one row per line."""
    if first.startswith("["):
        raise FinetuneError(
            f"{path}: it contains a JSON list, expected one row per line; rename it to end in .json"
        )
    if first in ("{", '{"'):
        raise FinetuneError(
            f"{path}: its first row spans several lines, expected one row per line; write each row "
            "on one line (jq -c . does), or a list of rows to a file that ends in .json"
        )


def read_json(path: File) -> Iterator[NumberedRow]:
    """Read a list of rows, or JSON lines with the suffix `.json`."""
    text = "".join(lines(path))
    if text.lstrip().startswith("{") and len(text.strip().splitlines()) > 1:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":  # a second value after the first: JSON lines
                yield from read_jsonl(path)
                return
        except (ValueError, RecursionError):
            pass  # reported below
    try:
        value = _parse(text)
    except BrokenText as problem:
        raise FinetuneError(f"{path}: {problem}") from None
    if not isinstance(value, list):
        raise FinetuneError(f"{path}: it contains one JSON value, expected a list of rows")
    yield from enumerate(value, 1)


JOINED = (
    "a quote at the start of a cell joins {lines} lines, each of which is a row of its own by its "
    'tabs; write a quote that belongs to the text twice within quotes: """Hello"" she said"'
)
"""A record of a TSV file that an unpaired quote made of several rows."""


def read_csv(path: File, delimiter: str = ",") -> Iterator[NumberedRow]:
    """Read a CSV file with a header; fields may have any length."""
    csv.field_size_limit(sys.maxsize)
    taken = list[str]()
    reader = csv.DictReader(_noted(lines(path), taken), strict=True, delimiter=delimiter)
    number = 0
    try:
        _check_header(path, list(reader.fieldnames or ()), delimiter)
        columns = len(reader.fieldnames or ())
        taken.clear()
        for row in reader:
            number += 1
            joined = [line for line in taken if line.strip("\r\n")]
            taken.clear()
            several = delimiter == "\t" and columns > 1 and len(joined) > 1
            if several and all(line.count(delimiter) == columns - 1 for line in joined):
                problem = JOINED.format(lines=len(joined))
                yield number, Unreadable(problem, "".join(joined)[:EXCERPT])
                continue
            surplus = row.get(None)  # the csv module stores cells without a column here
            if surplus:
                text = json.dumps({str(name): value for name, value in row.items()})
                problem = f"{len(surplus)} more cells than the header has columns"
                yield number, Unreadable(problem, text[:EXCERPT])
            else:
                yield number, row
    except csv.Error as error:
        kind = "CSV" if delimiter == "," else "TSV"
        raise FinetuneError(f"{path} row {number + 1}: broken {kind}: {error}") from None


def _noted(values: Iterable[str], taken: list[str]) -> Iterator[str]:
    """Yield values and append them to `taken`."""
    for value in values:
        taken.append(value)
        yield value


def _check_header(path: File, names: list[str], delimiter: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise FinetuneError(f"{path}: the header has the column '{name}' more than once")
    others = {";": "';'", "\t": "a tab", "|": "'|'", ",": "','"}
    found = [other for other in others if other != delimiter and other in names[0]] if names else []
    if len(names) == 1 and found:
        instead = {"\t": "rename it to end in .tsv", ",": "rename it to end in .csv"}
        raise FinetuneError(
            f"{path}: its header is one column, {names[0]!r}: the delimiter is {others[found[0]]}, "
            f"expected {others[delimiter]}; {instead.get(found[0], 'write it with commas')}"
        )


def read_tsv(path: File) -> Iterator[NumberedRow]:
    return read_csv(path, "\t")


def read_text(path: File) -> Iterator[NumberedRow]:
    """Read the documents of a text file, separated by lines `<|endoftext|>`."""
    document, first = list[str](), 1
    for number, line in enumerate(lines(path), 1):
        if line.strip() != DOCUMENT_END:
            document.append(line.replace("\r\n", "\n"))
            continue
        if "".join(document).strip():
            yield first, {"text": "".join(document).strip("\n")}
        document, first = [], number + 1
    if "".join(document).strip():
        yield first, {"text": "".join(document).strip("\n")}


READERS: dict[str, Callable[..., Iterator[NumberedRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".txt": read_text,
}
WHOLE = (".parquet", ".arrow")
"""Formats with compression of their own, which are not read from a compressed file."""


def kind_of_file(path: File) -> str | None:
    """The suffix of a readable file, without that of its compression; None for other files."""
    endings = [each.lower() for each in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        kind = endings[-2] if len(endings) > 1 else ""
        return kind if kind in READERS and kind not in WHOLE else None
    return endings[-1] if endings and endings[-1] in READERS else None


SKIPPING: tuple[Callable[..., Iterator[NumberedRow]], ...] = (read_jsonl, read_parquet)
"""Readers that begin at a place without reading what is before it."""


def read_file(path: File, place: Place | None = None) -> Iterator[NumberedRow]:
    """Yield the rows of a file of a known kind, after a place, which moves with them.

    Raises:
        FinetuneError: it cannot be read.
    """
    if size_of(path) == 0:
        raise FinetuneError(f"{path}: the file is empty")
    kind = kind_of_file(path)
    assert kind is not None
    reader, place = READERS[kind], place or Place()
    rows = reader(path, place) if reader in SKIPPING else reader(path)
    for number, row in rows:
        if number > place.row:
            place.row = number
            yield number, row


def why_not_read(path: File) -> str:
    """An error message for a file of an unsupported kind, with what to do."""
    ending = path.suffix.lower()
    known = f"{', '.join(READERS)} (text also as {', '.join(COMPRESSED)})"
    if ending in ARCHIVES or ".tar" in (each.lower() for each in path.suffixes):
        return f"{path} is an archive; unpack it"
    if ending in COMPRESSED:
        return f"{path} is not a {known} file; unpack it"
    return f"{path} is not a {known} file"


def _parse(text: str) -> Any:
    """Parse JSON; raises BrokenText."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text else ""
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise BrokenText(
            f"broken JSON at {line}column {error.colno}: {error.msg} near {near!r}"
        ) from None
    except ValueError as error:  # a repeated key, or a number with more digits than Python accepts
        raise BrokenText(f"broken JSON: {error}") from None
    except RecursionError:
        raise BrokenText("JSON nested too deeply") from None


# Lines.


def _open_with_arrow(raw: IO[bytes], path: File) -> IO[bytes]:
    """Decompress bzip2 or zstandard; Python's bz2 ends silently at bytes that are no stream."""
    import pyarrow  # slow to import

    kind = {".bz2": "bz2", ".zst": "zstd"}[path.suffix.lower()]
    opened: Any = pyarrow.input_stream(raw, compression=kind)
    return io.BufferedReader(opened)


COMPRESSED: dict[str, Callable[[IO[bytes], File], Any]] = {
    ".gz": lambda raw, _: gzip.GzipFile(fileobj=raw),
    ".bz2": _open_with_arrow,
    ".xz": lambda raw, _: lzma.LZMAFile(raw),  # noqa: SIM115 - the reader closes it
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


def raw_lines(path: File, place: Place | None = None) -> Iterator[bytes]:
    """Yield lines with their line ends, split at newlines only, from the byte of a place on.

    Raises FinetuneError for a file that cannot be decompressed, is of another kind, or is encoded
    in units of two or four bytes.
    """
    opener = COMPRESSED.get(path.suffix.lower())
    place = place or Place()
    try:
        with path.open("rb") as raw, raw if opener is None else opener(raw, path) as file:
            if file.seekable():
                file.seek(place.byte)
            else:
                skipped = 0
                while skipped < place.byte and (part := file.read(min(place.byte - skipped, SKIP))):
                    skipped += len(part)
            for line in file:
                if not place.byte:
                    _check_kind(path, line)
                place.byte += len(line)
                yield line
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if opener is None:
            raise
        raise FinetuneError(f"{path}: it cannot be decompressed: {error}") from None


def _check_kind(path: File, line: bytes) -> None:
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
    """Decode a line; drops a byte order mark from the first line. Raises BrokenText."""
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise BrokenText(
            f"not UTF-8 (byte {error.start} of the line is 0x{line[error.start]:02x}); convert it "
            "from its encoding, as in iconv -f LATIN1 -t UTF-8"
        ) from None


def lines(path: File) -> Iterator[str]:
    """Yield lines with their line ends; raises FinetuneError at the first that is not UTF-8."""
    for number, line in enumerate(raw_lines(path), 1):
        try:
            yield decode(line, number == 1)
        except BrokenText as problem:
            raise FinetuneError(f"{path} row {number}: {problem}") from None
