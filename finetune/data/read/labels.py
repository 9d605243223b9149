"""Read labels: a class, several classes, or a number."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from finetune.data.values import RowProblem, list_of, number_in, shown


def class_of(value: Any, names: Sequence[str], where: str = "label") -> int:
    """Index of a class that is given by its name, or by its index if no name is a number.

    Raises:
        RowProblem: the value is neither.
    """
    if isinstance(value, bool):
        value = "true" if value else "false"
    text = str(value).strip() if isinstance(value, int | float | str) else ""
    number, numbers = _number(text), list(map(_number, names))
    if text in names:
        return list(names).index(text)
    if number is not None and number in numbers:
        return numbers.index(number)
    by_index = numbers.count(None) == len(names)
    if by_index and number in range(len(names)):
        return int(text.partition(".")[0])
    known = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
    or_number = f" or its number, 0 to {len(names) - 1}" * by_index
    raise RowProblem(
        f"{where} is {shown(value)}, expected one of the recipe's labels ({known}){or_number}"
    )


def classes_of(value: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Sorted indices of the classes in a list, without duplicates.

    Raises:
        RowProblem: the value is not a list, an entry is not a class, or a number is repeated, as
            in a vector with a 0 or 1 for each class.
    """
    listed = list_of(value, "label")
    numbers = [each for each in listed if isinstance(each, int | float)]
    if len(set(numbers)) < len(numbers):
        raise RowProblem(
            f"label is {listed!s:.60}, in which a number is repeated: a list with a 0 or 1 for "
            "each class is not read; list the names or numbers of the classes that apply"
        )
    return tuple(sorted({class_of(e, names, f"label[{i}]") for i, e in enumerate(listed)}))


def number_of(value: Any) -> float:
    """A label that is a finite number; text is parsed, as in CSV.

    Raises:
        RowProblem: the value is not a finite number.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return number_in(value, "label")


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[+-]?\d+(\.\d+)?", text) else None
