"""Read rows of Parquet and Arrow files in the form that they would have in JSON.

A struct column has the keys of all rows, with null for keys that a row does not have: these nulls
are removed. In map columns and in lists, a null is a value of the row and is kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from finetune.data.read.remote import RemoteFile
from finetune.data.values import Unreadable
from finetune.errors import FinetuneError, reading

AT_ONCE = 1024
"""Rows that are converted at a time."""
Restore = Callable[[Any], Any]
"""Converts a value of a column to its JSON form."""
File = Path | RemoteFile


def size_of(path: File) -> int | None:
    """Bytes of a file; None if a server does not tell."""
    return path.size if isinstance(path, RemoteFile) else path.stat().st_size


def read_parquet(path: File, place: Any = None) -> Iterator[tuple[int, Any]]:
    """Read the row groups that have rows after a `files.Place`."""
    import pyarrow
    import pyarrow.parquet

    with reading(f"{path}: it is not a complete Parquet file"):
        opened = path if isinstance(path, Path) else path.open()
        table = pyarrow.parquet.ParquetFile(opened)
        sizes = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        first = skipped = 0
        while place is not None and first < len(sizes) and skipped + sizes[first] <= place.row:
            skipped += sizes[first]
            first += 1
        groups = range(first, len(sizes))
        batches = table.iter_batches(batch_size=AT_ONCE, row_groups=groups)
        yield from _numbered(path, batches, skipped)


def read_arrow(path: File) -> Iterator[tuple[int, Any]]:
    """Read an Arrow file in the stream format (`datasets`) or the file format (Feather)."""
    import pyarrow

    problem = f"{path}: it is not a complete Arrow file"
    local = isinstance(path, Path)
    with reading(problem), pyarrow.memory_map(str(path)) if local else path.open() as source:
        yield from _numbered(path, _batches(source))


def _batches(source: Any) -> Iterator[Any]:
    import pyarrow

    try:
        stream = pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        file = pyarrow.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from stream


def _numbered(path: File, batches: Iterator[Any], number: int = 0) -> Iterator[tuple[int, Any]]:
    """Rows of batches with their numbers, those after `number`."""
    restored: dict[str, Restore] | None = None
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if batch.schema.names.count(name) > 1:
                raise FinetuneError(f"{path}: it has the column '{name}' more than once")
            with reading(f"{path}: it is damaged in its column '{name}'"):
                column.validate(full=True)  # reading offsets beyond a buffer ends the process
        restored = restorers(batch.schema) if restored is None else restored
        for start in range(0, batch.num_rows, AT_ONCE):
            for row in _values(batch.slice(start, AT_ONCE)):
                number += 1
                if not isinstance(row, Unreadable):
                    for name, restore in restored.items():
                        row[name] = restore(row[name])
                yield number, row


def _values(batch: Any) -> list[Any]:
    """Rows of a batch; Unreadable for one with a date outside Python's range or a repeated key."""
    import pyarrow

    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError, pyarrow.ArrowException) as error:
        if batch.num_rows == 1:
            return [Unreadable(f"cannot be read: {error}")]
        return [row for n in range(batch.num_rows) for row in _values(batch.slice(n, 1))]


# Types.


def restorers(schema: Any, is_decoded: bool = False) -> dict[str, Restore]:
    """Functions that restore the JSON form of each column, for the columns that need one.

    Args:
        schema: Arrow schema; in its metadata, `datasets` stores which text columns are JSON.
        is_decoded: Whether these texts are already parsed.
    """
    noted = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(noted).get("info", {}).get("features") if noted else None
    found: dict[str, Restore] = {}
    for field in schema:
        feature = features.get(field.name) if isinstance(features, Mapping) else None
        restore = _restorer(field.type, feature, is_decoded)
        if restore is not None:
            found[field.name] = restore
    return found


def _restorer(kind: Any, feature: Any, is_decoded: bool) -> Restore | None:
    import pyarrow
    import pyarrow.types as types

    name = feature.get("_type") if isinstance(feature, Mapping) else None
    if name == "Json" or getattr(kind, "extension_name", None) == "arrow.json":
        return None if is_decoded else _parsed
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _restorer(kind.storage_type, None, is_decoded)
    if types.is_dictionary(kind):
        return _restorer(kind.value_type, feature, is_decoded)
    if types.is_struct(kind):
        own = feature if isinstance(feature, Mapping) else {}
        inner = {f.name: _restorer(f.type, own.get(f.name), is_decoded) for f in kind}
        return partial(_restored_struct, inner)
    if types.is_map(kind):
        inside = _restorer(kind.item_type, None, is_decoded)
        return None if inside is None else partial(_restored_inside, inside)
    if types.is_nested(kind) and not types.is_union(kind):  # any kind of list
        first = feature[0] if isinstance(feature, list) and feature else None
        own = feature.get("feature") if isinstance(feature, Mapping) else first
        inside = _restorer(kind.value_type, own, is_decoded)
        return None if inside is None else partial(_restored_inside, inside)
    return None


def _parsed(value: Any) -> Any:
    """Parse a JSON text; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _restored_struct(inner: Mapping[str, Restore | None], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        name: each if (restore := inner.get(name)) is None else restore(each)
        for name, each in value.items()
        if each is not None
    }


def _restored_inside(inner: Restore, value: Any) -> Any:
    """Restore the values of a map or a list."""
    if isinstance(value, Mapping):
        return {name: inner(each) for name, each in value.items()}
    return value if value is None else [inner(each) for each in value]


def without_nulls(value: Any) -> Any:
    """Remove null values of objects, for values without a known type."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
