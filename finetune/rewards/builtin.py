"""Built-in reward functions.

Each returns a number from 0 to 1 per completion, or None for a completion that it does not score. A
completion is a text, or a list with a single message that answers a conversation.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError, reading

Completion = str | list[dict[str, Any]]
QUOTED = 60
"""Maximum characters of an answer in a message."""


def text_of(said: Completion) -> str:
    """The text itself, or the content of a conversation's last message."""
    return said if isinstance(said, str) else str(said[-1]["content"])


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse wrong arguments of a built-in reward before anything is loaded.

    Raises:
        FinetuneError: with the argument.
    """
    prefix = f"reward_funcs: '{name}': `arguments`"
    pattern, target = arguments.get("pattern"), arguments.get("target")
    if pattern is not None and not isinstance(pattern, str):
        raise FinetuneError(f"{prefix}: pattern is {pattern!r}, expected a regular expression")
    if pattern is not None:
        _compiled(pattern, f"{prefix}: pattern ")
    wrong = isinstance(target, bool) or not isinstance(target, int) or target < 1
    if "target" in arguments and wrong:
        raise FinetuneError(
            f"{prefix}: target is {target!r}, expected a number of tokens, 1 or more"
        )


def exact_match(
    completions: list[Completion],
    answer: list[str | None],
    pattern: str | None = None,
    **_: Any,
) -> list[float | None]:
    """1 if a completion equals the column `answer`, ignoring leading and trailing whitespace.

    With the regular expression `pattern`: 1 if its last match equals that in the answer.
    """
    wanted_parts = [None if each is None else _part(str(each), pattern) for each in answer]
    return [
        None if wanted is None else float(_part(text_of(said), pattern) == wanted)
        for said, wanted in zip(completions, wanted_parts, strict=True)
    ]


def json_valid(completions: list[Completion], **_: Any) -> list[float]:
    """1 if a completion is a single JSON value."""
    return [float(_parsed(said) is not _NOT_JSON) for said in completions]


def json_fields(
    completions: list[Completion], answer: list[str | None], **_: Any
) -> list[float | None]:
    """Share of fields with equal values in a completion and the JSON object of column `answer`.

    0 if a completion is not a JSON object; fields that the answer does not have lower the share.
    """
    return [
        None if wanted is None else _share(_parsed(said), _fields(wanted))
        for said, wanted in zip(completions, answer, strict=True)
    ]


def regex(completions: list[Completion], pattern: str, **_: Any) -> list[float]:
    """1 if the regular expression `pattern` matches the complete completion."""
    wanted = _compiled(pattern)
    return [float(wanted.fullmatch(text_of(said).strip()) is not None) for said in completions]


def length(
    completions: list[Completion],
    completion_ids: list[list[int]],
    target: int,
    **_: Any,
) -> list[float]:
    """1 for a completion of at most `target` tokens, falling linearly to 0 at twice as many."""
    return [min(1.0, max(0.0, 2.0 - len(ids) / target)) for ids in completion_ids]


def _part(text: str, pattern: str | None) -> str:
    """A text, or the last match of a pattern in it; empty if there is none."""
    if pattern is None:
        return text.strip()
    found = list(_compiled(pattern).finditer(text))
    return found[-1][0].strip() if found else ""


def _compiled(pattern: str, where: str = "") -> re.Pattern[str]:
    with reading(f"{where}'{pattern}' is not a regular expression"):
        return re.compile(pattern, re.DOTALL)


_NOT_JSON = object()


def _parsed(said: Completion) -> Any:
    try:
        return json.loads(text_of(said))
    except (ValueError, RecursionError):
        return _NOT_JSON


def _fields(answer: Any) -> dict[str, Any]:
    """A JSON object from the column `answer`: text, or already parsed."""
    found = answer if isinstance(answer, dict) else _parsed(str(answer))
    if not isinstance(found, dict):
        shown = repr(answer if len(str(answer)) <= QUOTED else f"{str(answer)[:QUOTED]}...")
        raise FinetuneError(f"column 'answer' is {shown}, expected a JSON object")
    return found


def _share(found: Any, wanted: dict[str, Any]) -> float:
    if not isinstance(found, dict):
        return 0.0
    names = found.keys() | wanted.keys()
    alike = sum(name in found and name in wanted and found[name] == wanted[name] for name in names)
    return alike / len(names) if names else 1.0
