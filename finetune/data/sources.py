"""Rows of files and of hub data sets, each with the place that an error message names."""

import codecs
import contextlib
import csv
import difflib
import glob
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.data.formats import find_format
from finetune.errors import FinetuneError
from finetune.recipe import Data, Recipe

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
DOCUMENT_END = "<|endoftext|>"
"""A line of a text file that separates documents, as published corpora write it."""


@dataclass(frozen=True)
class SourceRow:
    """A row before its format is applied."""

    file: str
    """The file, or the hub data set and its split, as an error names it."""
    number: int
    """Counted from 1; in JSONL and text files it is that of the line."""
    value: Any

    @property
    def place(self) -> str:
        return f"{self.file} row {self.number}"


@dataclass(frozen=True)
class Source:
    """A section of a recipe's data with the files that it names; no files for a hub data set."""

    data: Data
    files: tuple[Path, ...]
    unread: tuple[Path, ...] = ()
    """Files of a folder or glob that are of no kind that is read."""

    def rows(self) -> Iterator[SourceRow]:
        """Rows in order; raises FinetuneError at the first that cannot be read."""
        if not self.files:
            yield from hub_rows(self.data)
        for path in self.files:
            if not path.stat().st_size:
                raise FinetuneError(f"{path}: the file is empty")
            for number, value in READERS[path.suffix](path):
                yield SourceRow(str(path), number, value)


def find_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """Files of `data` and `eval_data`; every unknown format and missing file is one problem."""
    problems = list[str]()
    if not recipe.data:
        problems.append("data: the recipe has none; give with_data(Data(source, format))")
    found: tuple[list[Source], list[Source]] = ([], [])
    for sources, section in zip(found, (recipe.data, recipe.eval_data), strict=True):
        for data in section:
            try:
                find_format(data.format)
                sources.append(find_source(data))
            except FinetuneError as error:
                problems.extend(error.problems)
    if problems:
        raise FinetuneError(*problems)
    return found


def find_source(data: Data) -> Source:
    """The files that a section names; raises FinetuneError where there are none."""
    source = _found(data)
    if data.stream and source.files:
        raise FinetuneError(
            f"data.stream: {data.source} is here, and files are read piece by piece; leave it out"
        )
    return source


def _found(data: Data) -> Source:
    known = ", ".join(READERS)
    if glob.has_magic(data.source) and not Path(data.source).exists():
        found = sorted(Path(name) for name in glob.glob(data.source, recursive=True))
        files, unread = _by_kind(found)
        if not files:
            what = f"matches {len(found)} paths, none of them a {known} file"
            raise FinetuneError(
                f"data.source: '{data.source}' {what if found else 'matches nothing'}"
            )
        return Source(data, files, unread)
    path = Path(data.source).expanduser()
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(p) for p in path.iterdir() if p.is_dir()))
        raise FinetuneError(f"data.source: {path} holds several splits; name one of {splits}")
    if (path / "state.json").is_file():  # what `Dataset.save_to_disk` writes
        return Source(data, tuple(sorted(path.glob("*.arrow"))))
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if not _hidden(p.relative_to(path)))
        files, unread = _by_kind(inside)
        if not files:
            raise FinetuneError(f"data.source: the folder {path} holds no {known} file")
        return Source(data, files, unread)
    if path.is_file():
        if path.suffix not in READERS:
            raise FinetuneError(f"data.source: {path} is no {known} file")
        return Source(data, (path,))
    if path.suffix in READERS or path.is_absolute() or not HUB_NAME.fullmatch(data.source):
        raise FinetuneError(f"data.source: no such file or folder: {data.source}{_beside(path)}")
    return Source(data, ())


def _by_kind(paths: list[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files among some paths that can be read, and the others."""
    files = [path for path in paths if path.is_file()]
    return (
        tuple(path for path in files if path.suffix in READERS),
        tuple(path for path in files if path.suffix not in READERS),
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _beside(path: Path) -> str:
    """A file of a similar name in the same folder, or that the folder is missing."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    close = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


# Files. A reader yields (row number, row).


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, _parse(line.strip(), f"{path} row {number}")


def read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of rows, or rows one to a line under the name of JSON."""
    text = _decoded(path)
    if text.lstrip().startswith("{") and len(text.strip().splitlines()) > 1:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":  # a second value follows the first: JSON lines
                yield from read_jsonl(path)
                return
        except (ValueError, RecursionError):
            pass  # told below
    value = _parse(text, str(path))
    if not isinstance(value, list):
        raise FinetuneError(f"{path}: it holds one JSON value, expected a list of rows")
    yield from enumerate(value, 1)


def read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in _values(batch, path, number):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise FinetuneError(f"{path}: it is not a whole Parquet file: {error}") from None


def read_arrow(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of an Arrow file, in the form of `datasets` (a stream) or of Feather (a file)."""
    import pyarrow

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in _arrow_batches(source):
                for start in range(0, batch.num_rows, 1024):
                    for row in _values(batch.slice(start, 1024), path, number):
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise FinetuneError(f"{path}: it is not a whole Arrow file: {error}") from None


def _values(batch: Any, path: Path, before: int) -> list[Any]:
    """Rows of an Arrow batch behind so many others; raises FinetuneError for what is no value.

    That is text that is not UTF-8, which no writer has to check, or a date out of Python's reach.
    """
    import pyarrow

    unreadable = (ValueError, OverflowError, pyarrow.ArrowException)
    try:
        return batch.to_pylist()
    except unreadable:
        for row in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column.slice(row, 1).to_pylist()
                except unreadable as error:
                    raise FinetuneError(
                        f"{path} row {before + row + 1}: column '{name}' cannot be read: {error}"
                    ) from None
        raise


def _arrow_batches(source: Any) -> Iterator[Any]:
    import pyarrow

    try:
        stream = pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        file = pyarrow.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from stream


def read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a CSV file with a header; a field may be as long as it likes."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_lines(path), strict=True)
    number = 0
    try:
        names = reader.fieldnames or ()
        for name in names:
            if list(names).count(name) > 1:
                raise FinetuneError(f"{path}: the header has the column '{name}' more than once")
        for row in reader:
            number += 1
            surplus = row.get(None)  # where the csv module puts cells without a column
            if surplus:
                raise FinetuneError(
                    f"{path} row {number}: {len(surplus)} more cells than the header has columns"
                )
            yield number, row
    except csv.Error as error:
        raise FinetuneError(f"{path} row {number + 1}: broken CSV: {error}") from None


def read_text(path: Path) -> Iterator[tuple[int, Any]]:
    """Documents of a text file: the whole of it, or what stands between `<|endoftext|>` lines."""
    document, first = list[str](), 1
    for number, line in enumerate(_lines(path), 1):
        if line.strip() != DOCUMENT_END:
            document.append(line.replace("\r\n", "\n"))
            continue
        if "".join(document).strip():
            yield first, {"text": "".join(document).strip("\n")}
        document, first = [], number + 1
    if "".join(document).strip():
        yield first, {"text": "".join(document).strip("\n")}


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".csv": read_csv,
    ".txt": read_text,
}


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, split at newlines only; raises FinetuneError for other encodings."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                utf16 = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                raise FinetuneError(
                    f"{path} row {number}: not UTF-8 (byte {error.start} of the line is "
                    f"0x{line[error.start]:02x}); convert it: iconv -f "
                    f"{'UTF-16' if utf16 else 'LATIN1'} -t UTF-8"
                ) from None


def _decoded(path: Path) -> str:
    return "".join(_lines(path))


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text else ""
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise FinetuneError(
            f"{place}: broken JSON at {line}column {error.colno}: {error.msg} near {near!r}"
        ) from None
    except ValueError as error:  # a number of more digits than Python reads
        raise FinetuneError(f"{place}: broken JSON: {error}") from None
    except RecursionError:
        raise FinetuneError(f"{place}: JSON nested too deeply") from None


# The hub.


def hub_rows(data: Data) -> Iterator[SourceRow]:
    """Rows of a data set of the Hugging Face hub."""
    with _hub(data) as datasets:
        rows = datasets.load_dataset(
            data.source, data.subset, split=data.split, streaming=data.stream
        )
        for number, row in enumerate(rows, 1):
            yield SourceRow(f"{data.source} ({data.split})", number, row)


def hub_version(data: Data) -> str:
    """What tells one content of a hub data set from another."""
    with _hub(data) as datasets:
        if data.stream:  # the commit
            return datasets.load_dataset_builder(data.source, data.subset).hash
        # A hash of the split's files and revision.
        return datasets.load_dataset(data.source, data.subset, split=data.split)._fingerprint


@contextlib.contextmanager
def _hub(data: Data) -> Iterator[ModuleType]:
    """`datasets`, where what the hub refuses is a FinetuneError with its reason."""
    import datasets  # takes over a second, and local files do not need it
    from datasets.exceptions import DatasetsError

    try:
        yield datasets
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FinetuneError(
            f"data.source: '{data.source}' is no file or folder here, and the hub gave: {reason}"
        ) from None
