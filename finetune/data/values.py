"""Type checks for values of a row, and the error that a wrong type raises."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Raw = Mapping[str, Any]
LARGEST = 3.4e38
"""Maximum absolute value of fp32, rounded down."""


class RowProblem(ValueError):
    """A row does not have the shape that its format needs; the reader adds file and row number."""


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for a row that cannot be read from its file."""

    problem: str
    text: str = ""
    """The beginning of the row's raw text."""


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of key-value pairs; raises ValueError if a key is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"the key {twice!r} occurs {names.count(twice)} times in one object, with "
            f"{', '.join(f'{value!r:.60}' for name, value in pairs if name == twice)}; keep one"
        )
    return found


parse_json: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_unrepeated).decode
"""Parse JSON; raises ValueError, also for a repeated key, of which `json.loads` keeps one value."""


def json_text(value: Any) -> str:
    """The JSON of a row; what has no JSON form is written as text, keys included."""
    try:
        return json.dumps(value, default=str)
    except TypeError:
        return json.dumps(_with_text_keys(value), default=str)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, list) else value


def json_of(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RowProblem(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise RowProblem(f"{where} is JSON nested too deeply") from None


def is_given(value: Any) -> bool:
    """Whether a value is not empty; objects that contain only empty values are empty."""
    if isinstance(value, Mapping):
        return any(is_given(each) for each in value.values())
    return value is not None and value not in ("", [], ())


def text_of(row: Raw, column: str, where: str = "") -> str:
    value = row.get(column)
    if not isinstance(value, str):
        place = f"{where}.{column}" if where else column
        raise RowProblem(f"{place} is {kind_of(value)}, expected text")
    return value


def text_if_given(row: Raw, column: str) -> str:
    """The text of an optional column; empty without one. Zero and false are not text."""
    return text_of(row, column) if is_given(row.get(column)) else ""


def list_of(value: Any, where: str) -> list[Any]:
    """A list, or a list that is stored as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json_of(value, where)
    if not isinstance(value, list):
        raise RowProblem(f"{where} is {kind_of(value)}, expected a list")
    return value


def number_in(value: Any, where: str) -> float:
    """A number that fp32 can hold; raises RowProblem for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= LARGEST:  # also NaN
        raise RowProblem(f"{where} is {shown(value)}, expected a finite number")
    return float(value)


def shown(value: Any) -> str:
    """A text or number as it is, and the kind of any other value."""
    return f"{value!r:.60}" if isinstance(value, str | int | float) else kind_of(value)


def kind_of(value: Any) -> str:
    kinds = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"of type {type(value).__name__}")
