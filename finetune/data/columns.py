"""Find columns that a format must not ignore, and guess the format that fits a row."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from finetune.data.chat.messages import NOT_TEXT
from finetune.data.values import Raw, is_given

PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages")
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
TURNS = {
    ("role", "content"): ("messages", "messages"),
    ("from", "value"): ("sharegpt", "conversations"),
}
"""Keys of a turn, with the format that reads them and the format's column."""


def verdict(value: Any) -> bool | None:
    """A label as a boolean, also from text as in CSV; None for other labels, such as classes."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str):
        return words.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _is_verdict(value: Any) -> bool:
    return verdict(value) is not None


def _is_filled_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_partial_weight(value: Any) -> bool:
    try:
        return float(value) != 1
    except (TypeError, ValueError):
        return False


def _is_refusal(value: Any) -> bool:
    """Whether a flag marks a row as not trained."""
    words = ("false", "0", "no")
    return value.strip().lower() in words if isinstance(value, str) else value in (False, 0)


Check = Callable[[Any], bool]

MEANING: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(NOT_TEXT, (is_given, "only text is trained")),
    **dict.fromkeys(
        PREFERENCES,
        (is_given, "it belongs to a pair of answers, which methods such as 'dpo' learn from"),
    ),
    "label": (_is_verdict, "unwanted answers would be trained too; format 'kto' reads it"),
    "kto_tag": (_is_verdict, "unwanted answers would be trained too; format 'kto' reads it"),
    "history": (is_given, "earlier turns would be lost"),
    "system": (is_given, "the system prompt would be lost"),
    "system_prompt": (is_given, 'use columns={"system_prompt": "system"}'),
    "system_message": (is_given, 'use columns={"system_message": "system"}'),
    "tools": (is_given, "the functions would be lost"),
    "functions": (is_given, "the functions would be lost"),
    "chat_template_kwargs": (is_given, "the template's variables would be lost"),
    **dict.fromkeys(
        ("reasoning_content", "thinking"),
        (_is_filled_text, "the reasoning would be lost; format 'messages' reads it in a message"),
    ),
    **dict.fromkeys(
        ("weight", "loss_weight", "sample_weight"),
        (_is_partial_weight, "every row has the same weight; a source has `repeat` and `weight`"),
    ),
    **dict.fromkeys(
        ("train", "trainable", "train_turn"), (_is_refusal, "rows with false would be trained too")
    ),
}
"""Columns that change the meaning of a row: a check of the value, and what ignoring it would do."""


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


def guess(row: Raw, wanted: str = "") -> tuple[str, dict[str, str | None]] | None:
    """Guess the format and `columns` that would read a row, by its column names; None if none fit.

    Args:
        wanted: The preferred format.
    """
    columns = [column for column, value in row.items() if value is not None]
    for column in columns:
        for keys, (name, ours) in TURNS.items():
            if column not in MEANING and _is_list_of(row[column], keys):
                return name, {} if column == ours else {column: ours}
    answer = next((name for name in ANSWERS if name in columns), None)
    prompt = next((name for name in PROMPTS if name in columns and name != answer), None)
    if answer is None or prompt is None:
        return None
    context = next((n for n in CONTEXTS if n in columns and n not in (prompt, answer)), None)
    name = wanted if wanted in PAIRS else "question_answer"
    if context is not None and name == "question_answer":
        name = "alpaca"
    named: dict[str, str | None] = dict(zip((prompt, answer), PAIRS[name], strict=True))
    if context is not None and name == "alpaca":
        named[context] = "input"
    taken = {ours for ours in named.values() if ours in row and ours not in named}
    changed = {theirs: ours for theirs, ours in named.items() if theirs != ours}
    return name, changed | dict.fromkeys(sorted(filter(None, taken)))


def _is_list_of(value: Any, keys: tuple[str, ...]) -> bool:
    """Whether a value is a non-empty list of objects that all have the keys."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and each.keys() >= set(keys) for each in value)
    )


def columns_hint(name: str, columns: Mapping[str, str | None]) -> str:
    """Advice to use a format with `columns`."""
    return f"format '{name}' would fit with columns={json.dumps(columns)}"


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
