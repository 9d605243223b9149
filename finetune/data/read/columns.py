"""Find columns that a format must not ignore, and guess the format that fits a row."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune.data.chat.messages import NOT_TEXT
from finetune.data.values import Raw, is_given
from finetune.recipe import Data

PREFERENCES = (
    "chosen", "rejected", "rejected_response", "rejected_messages",
    "preferred_output", "non_preferred_output",
)  # fmt: skip
PROMPTS = (
    "instruction", "question", "prompt", "query", "problem", "input", "inputs", "text", "user",
    "human", "task_description",
)  # fmt: skip
"""Column names of user prompts in published data sets."""
CONTEXTS = ("context", "input", "passage", "document")
"""Column names of a question's context."""
ANSWERS = (
    "response", "output", "completion", "solution", "answer", "code", "canonical_solution",
    "target", "targets", "outputs", "assistant", "gpt", "reply", "summary",
)  # fmt: skip
"""Column names of assistant answers."""


PAIRS = {
    "question_answer": ("question", "answer"),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""Formats of a prompt and an answer, with the names of these two columns."""
TURNS = {"messages": "messages", "sharegpt": "conversations"}
"""Formats of a list of turns, with the name of its column."""


def verdict(value: Any) -> bool | None:
    """A label as a boolean, also from text as in CSV; None for other labels, such as classes."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str):
        return words.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _is_partial_weight(value: Any) -> bool:
    try:
        return float(value) != 1
    except (TypeError, ValueError):
        return False


def _has_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_false(value: Any) -> bool:
    return verdict(value) is False or str(value).strip().lower() == "no"


IGNORED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (NOT_TEXT, is_given, "only text is trained, and images of conversations with model.reads"),
    (PREFERENCES, is_given,
        "it belongs to a pair of answers, which methods such as 'dpo' learn from"),
    (("label", "kto_tag"), lambda value: verdict(value) is not None,
        "unwanted answers would be trained too"),
    (("history",), is_given, "earlier turns would be lost"),
    (("system",), is_given, "the system prompt would be lost"),
    (("system_prompt",), is_given, 'use columns={"system_prompt": "system"}'),
    (("system_message",), is_given, 'use columns={"system_message": "system"}'),
    (("tools", "functions"), is_given, "the functions would be lost"),
    (("chat_template_kwargs",), is_given, "the template's variables would be lost"),
    (("reasoning_content", "thinking"), _has_text,
        "the reasoning would be lost; format 'messages' reads it in a message"),
    (("weight", "loss_weight", "sample_weight"), _is_partial_weight,
        "every row has the same weight; a source has `repeat` and `weight`"),
    (("train", "trainable", "train_turn"), _is_false, "rows with false would be trained too"),
)  # fmt: skip
"""Columns that change the meaning of a row: a check of the value, and what ignoring it would do."""
MEANING = {name: (check, why) for names, check, why in IGNORED for name in names}


def ignored_meaning(name: str, row: Raw, read: frozenset[str]) -> str | None:
    """Why a format that reads the columns `read` must not read a row; None if it may."""
    for column in row.keys() & MEANING.keys() - read:
        says, why = MEANING[column]
        classes = column == "label" and "text" in read and not isinstance(row[column], bool)
        if says(row[column]) and not classes:
            leave = json.dumps({column: None})
            return (
                f"column '{column}' is not read by format '{name}': {why}; to leave it out: "
                f"columns={leave}"
            )
    return None


def guesses(row: Raw, wanted: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield formats and `columns` that might read a row, by the names of its columns.

    Args:
        wanted: The preferred format.
    """
    columns = [column for column, value in row.items() if value is not None]
    for column in columns:
        if isinstance(row[column], list) and column not in MEANING:
            yield from ((name, {column: ours}) for name, ours in TURNS.items())
    answer = next((name for name in ANSWERS if name in columns), None)
    prompt = next((name for name in PROMPTS if name in columns and name != answer), None)
    if answer is None or prompt is None:
        return
    context = next((n for n in CONTEXTS if n in columns and n not in (prompt, answer)), None)
    name = wanted if wanted in PAIRS else "question_answer"
    if context is not None and name == "question_answer":
        name = "alpaca"
    named: dict[str, str | None] = dict(zip((prompt, answer), PAIRS[name], strict=True))
    if context is not None and name == "alpaca":
        named[context] = "input"
    taken = {ours for ours in named.values() if ours in row and ours not in named}
    changed = {theirs: ours for theirs, ours in named.items() if theirs != ours}
    yield name, changed | dict.fromkeys(sorted(filter(None, taken)))


def rename(row: Mapping[str, Any], columns: Mapping[str, str | None]) -> dict[str, Any]:
    """Rename the columns of a row to the format's names; columns mapped to None are dropped.

    Raises KeyError with a name that two columns would share.
    """
    named: dict[str, Any] = {}
    for column, value in row.items():
        name = columns.get(column, column)
        if name is None:
            continue
        if name in named:
            raise KeyError(name)
        named[name] = value
    return named


OF_TURNS = "[]."
"""Separates a column of turns from a key of each turn, in the names of `Data.columns`."""
SPEAKERS = ("role", "from")


def rewritten(row: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """A row of a source with the names, roles and texts that its section asks for.

    Raises KeyError with a name that two columns, or two keys of a turn, would share.
    """
    columns = {name: ours for name, ours in data.columns.items() if OF_TURNS not in name}
    changed: Mapping[str, Any] = row
    if data.replace:
        changed = _replaced(row, data.replace)
    if len(columns) < len(data.columns) or data.roles:
        changed = {name: _turns(name, value, data) for name, value in changed.items()}
    named = rename(changed, columns)
    if data.system is not None and not is_given(named.get("system")):
        turns = [turn for value in named.values() for turn in _turns_in(value)]
        if not any(turn.get(key) == "system" for turn in turns for key in SPEAKERS):
            named["system"] = data.system
    return named


def names_in(row: Mapping[str, Any]) -> set[str]:
    """Names of a row's columns, and of the keys of its turns as `Data.columns` writes them."""
    return {*row} | {
        f"{name}{OF_TURNS}{key}" for name, value in row.items() for turn in _turns_in(value)
        for key in turn
    }  # fmt: skip


def _turns_in(value: Any) -> list[Mapping[str, Any]]:
    return [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []


def _turns(column: str, value: Any, data: Data) -> Any:
    """The turns of a column with their keys and roles renamed; other values as they are."""
    if not _turns_in(value):
        return value
    start = column + OF_TURNS
    keys = {k.removeprefix(start): v for k, v in data.columns.items() if k.startswith(start)}
    turns = [rename(turn, keys) if isinstance(turn, Mapping) else turn for turn in value]
    for turn in _turns_in(turns):
        assert isinstance(turn, dict)
        turn |= {key: data.roles.get(str(turn[key]), turn[key]) for key in SPEAKERS if key in turn}
    return turns


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(each, texts) for key, each in value.items()}
    return [_replaced(each, texts) for each in value] if isinstance(value, list) else value
