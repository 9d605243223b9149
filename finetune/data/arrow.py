"""Read rows of Parquet and Arrow files in the form that they would have in JSON.

A struct column has the keys of all rows, with null for keys that a row does not have: these nulls
are removed. In map columns and in lists, a null is a value of the row and is kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.data.values import Unreadable
from finetune.errors import FinetuneError, reading

AT_ONCE = 1024
"""Rows that are converted at a time."""
Restore = Callable[[Any], Any]
"""Converts a value of a column to its JSON form."""


def read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    with reading(f"{path}: it is not a complete Parquet file"):
        table = pyarrow.parquet.ParquetFile(path)
        yield from _numbered(path, table.iter_batches(batch_size=AT_ONCE))


def read_arrow(path: Path) -> Iterator[tuple[int, Any]]:
    """Read an Arrow file in the stream format (`datasets`) or the file format (Feather)."""
    import pyarrow

    problem = f"{path}: it is not a complete Arrow file"
    with reading(problem), pyarrow.memory_map(str(path)) as source:
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


def _numbered(path: Path, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    number = 0
    restored: dict[str, Restore] | None = None
    for batch in batches:
        for name in batch.schema.names:
            if batch.schema.names.count(name) > 1:
                raise FinetuneError(f"{path}: it has the column '{name}' more than once")
        for column in batch.columns:
            _refuse_torn(column)
        restored = restorers(batch.schema) if restored is None else restored
        for start in range(0, batch.num_rows, AT_ONCE):
            for row in _values(batch.slice(start, AT_ONCE)):
                number += 1
                if not isinstance(row, Unreadable):
                    for name, restore in restored.items():
                        row[name] = restore(row[name])
                yield number, row


def _refuse_torn(column: Any) -> None:
    """Refuse a column whose offsets exceed its buffers: reading it would crash the process.

    Text that is not UTF-8 is accepted here: it is reported for its row.

    Raises:
        pyarrow.ArrowInvalid: the column is damaged.
    """
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        kind = column.type
        if _is_list(kind) or pyarrow.types.is_map(kind):
            _refuse_torn_offsets(column)
            _refuse_torn(column.values)
        elif pyarrow.types.is_struct(kind):
            for number in range(kind.num_fields):
                _refuse_torn(column.field(number))


def _refuse_torn_offsets(column: Any) -> None:
    """Check list offsets, which `validate` does not check after text that is not UTF-8."""
    import pyarrow

    if pyarrow.types.is_fixed_size_list(column.type):
        return  # has no offsets
    offsets = column.offsets.to_numpy()
    if (offsets[1:] < offsets[:-1]).any() or offsets[0] < 0 or offsets[-1] > len(column.values):
        raise pyarrow.ArrowInvalid("list offsets exceed the values of the list")


def _values(batch: Any) -> list[Any]:
    """Rows of a batch; Unreadable for a row with invalid UTF-8, which writers need not check, or
    with a date outside Python's range."""
    import pyarrow

    unreadable = (ValueError, OverflowError, KeyError, pyarrow.ArrowException)
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except unreadable:
        rows = list[Any]()
        for number in range(batch.num_rows):
            try:
                rows += batch.slice(number, 1).to_pylist(maps_as_pydicts="strict")
            except unreadable as error:
                rows.append(Unreadable(f"column '{_unreadable_column(batch, number)}' cannot be "
                                       f"read: {error}"))  # fmt: skip
        return rows


def _unreadable_column(batch: Any, number: int) -> str:
    import pyarrow

    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.slice(number, 1).to_pylist(maps_as_pydicts="strict")
        except (ValueError, OverflowError, KeyError, pyarrow.ArrowException):
            return name
    raise AssertionError("a row cannot be read whose columns can")


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
    import pyarrow.types as types

    name = feature.get("_type") if isinstance(feature, Mapping) else None
    if name == "Json" or getattr(kind, "extension_name", None) == "arrow.json":
        return None if is_decoded else _parsed
    if isinstance(kind, _extension()):
        return _restorer(kind.storage_type, None, is_decoded)
    if types.is_dictionary(kind):
        return _restorer(kind.value_type, feature, is_decoded)
    if types.is_map(kind):
        return _restore_map(_restorer(kind.item_type, None, is_decoded))
    if types.is_struct(kind):
        inner = {
            field.name: _restorer(
                field.type, feature.get(field.name) if isinstance(feature, Mapping) else None,
                is_decoded,
            )
            for field in kind
        }  # fmt: skip
        return _restore_struct(inner)
    if _is_list(kind):
        inside = feature[0] if isinstance(feature, list) and feature else None
        inside = feature.get("feature") if isinstance(feature, Mapping) else inside
        return _restore_list(_restorer(kind.value_type, inside, is_decoded))
    return None


def _extension() -> Any:
    import pyarrow

    return pyarrow.BaseExtensionType


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view,
             types.is_large_list_view)  # fmt: skip
    return any(test(kind) for test in tests)


def _parsed(value: Any) -> Any:
    """Parse a JSON text; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _restore_struct(inner: Mapping[str, Restore | None]) -> Restore:
    def restore(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: restored(each) if (restored := inner.get(name)) is not None else each
            for name, each in value.items()
            if each is not None
        }

    return restore


def _restore_map(inner: Restore | None) -> Restore | None:
    if inner is None:
        return None

    def restore(value: Any) -> Any:
        return value if value is None else {name: inner(each) for name, each in value.items()}

    return restore


def _restore_list(inner: Restore | None) -> Restore | None:
    if inner is None:
        return None

    def restore(value: Any) -> Any:
        return value if value is None else [inner(each) for each in value]

    return restore


def without_nulls(value: Any) -> Any:
    """Remove null values of objects, for values without a known type."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
