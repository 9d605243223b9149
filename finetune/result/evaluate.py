"""How often a model's greedy answer is exactly the reference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from finetune.data import formats
from finetune.data.formats import RowProblem, find_format, read_row
from finetune.data.sources import find_source
from finetune.errors import FinetuneError
from finetune.recipe import Data
from finetune.result.inference import Conversation, Loaded, generate, turn


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with the model's answer and the reference."""

    prompt: str
    answer: str
    expected: str
    matched: bool


@dataclasses.dataclass(frozen=True)
class Score:
    """Exact match over some conversations."""

    rows: int
    matched: int
    examples: tuple[Example, ...]
    """Every row, in order."""

    @property
    def share(self) -> float:
        return self.matched / self.rows


def answers(
    loaded: Loaded,
    conversations: Sequence[Conversation],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> list[str]:
    """Greedy answers to conversations, each in place of its final assistant message.

    Text that the template itself puts before an answer (an empty block of thought) is left out.
    """
    _check(conversations)
    scaffold = turn(loaded.tokenizer).scaffold.strip() if loaded.tokenizer.chat_template else ""
    asked = [conversation[:-1] for conversation in conversations]
    texts = generate(loaded, asked, max_new_tokens, batch_rows)
    return [text.strip().removeprefix(scaffold).strip() for text in texts]


def exact_match(
    loaded: Loaded,
    conversations: Sequence[Conversation],
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> Score:
    """Compare greedy answers with final assistant messages, both stripped of outer whitespace."""
    chosen = conversations[:limit]
    given = answers(loaded, chosen, max_new_tokens, batch_rows)
    examples = tuple(
        Example(_asked(conversation), answer, expected, answer == expected)
        for conversation, answer in zip(chosen, given, strict=True)
        for expected in [conversation[-1]["content"].strip()]
    )
    return Score(len(examples), sum(example.matched for example in examples), examples)


def samples(
    conversations: Sequence[Conversation], before: Sequence[str], after: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of `samples.json`: what was asked, both answers, and the reference."""
    return [
        {"prompt": _asked(row), "before": old, "after": new, "expected": row[-1]["content"]}
        for row, old, new in zip(conversations, before, after, strict=True)
    ]


def _asked(conversation: Conversation) -> str:
    """The last message before the answer."""
    return conversation[-2]["content"]


def _check(conversations: Sequence[Conversation]) -> None:
    if not conversations:
        raise FinetuneError("nothing to evaluate: no conversations were given")
    problems = [
        f"conversation {i}: needs a question and, at its end, an assistant message to compare with"
        for i, row in enumerate(conversations)
        if len(row) < 2 or row[-1]["role"] != "assistant"
    ]
    if problems:
        raise FinetuneError(*problems)


def references(data: Data) -> list[Conversation]:
    """Conversations of a data source, each with an answer to compare with at its end.

    Raises:
        FinetuneError: the source cannot be read, or a row is no such conversation.
    """
    find_format(data.format)
    rows: list[Conversation] = []
    for row in find_source(data).rows():
        try:
            sample = read_row(data.format, row.value)
        except RowProblem as problem:
            raise FinetuneError(f"{row.place}: {problem}") from None
        match sample:
            case formats.Conversation():
                rows.append(sample.messages)
            case formats.Completion():
                user = {"role": "user", "content": sample.prompt}
                rows.append([user, {"role": "assistant", "content": sample.completion}])
            case formats.Text():
                raise FinetuneError(f"{row.place}: a text has no answer to compare with")
        if data.first is not None and len(rows) >= data.first:
            break
    _check(rows)
    return rows
