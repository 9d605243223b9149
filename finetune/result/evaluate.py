"""How often a model's greedy answer is exactly the reference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from finetune.data.formats import Completion, Conversation, RowProblem, find_format, read_row
from finetune.data.render import load_chat
from finetune.data.sources import find_source
from finetune.errors import FinetuneError
from finetune.recipe import Data
from finetune.result.inference import Loaded, generate_from_ids, turn

Question = Conversation | Completion
"""A conversation that ends with the reference answer, or a prompt with its completion."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with the model's answer and the reference."""

    prompt: str
    answer: str
    expected: str
    matched: bool


@dataclasses.dataclass(frozen=True)
class Score:
    """Exact match over some questions."""

    rows: int
    matched: int
    examples: tuple[Example, ...]
    """Every row, in order."""

    @property
    def share(self) -> float:
        return self.matched / self.rows


def answers(
    loaded: Loaded,
    questions: Sequence[Question],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> list[str]:
    """Greedy answers to questions, asked with the very tokens that training puts before an answer.

    Text that the template itself puts before an answer (an empty block of thought) is left out.
    """
    _check(questions)
    chat = load_chat(loaded.tokenizer, None)
    if chat.template is None and any(isinstance(each, Conversation) for each in questions):
        raise FinetuneError(
            "the tokenizer has no chat template to ask with; train with model.chat_template"
        )
    prompts = [
        chat.prompt(
            question
            if isinstance(question, Completion)
            else dataclasses.replace(question, messages=question.messages[:-1])
        )
        for question in questions
    ]
    scaffold = turn(loaded.tokenizer).scaffold.strip() if chat.template is not None else ""
    texts = generate_from_ids(loaded, prompts, max_new_tokens, batch_rows)
    return [text.strip().removeprefix(scaffold).strip() for text in texts]


def exact_match(
    loaded: Loaded,
    questions: Sequence[Question],
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> Score:
    """Compare greedy answers with the references, both stripped of outer whitespace."""
    chosen = questions[:limit]
    given = answers(loaded, chosen, max_new_tokens, batch_rows)
    examples = tuple(
        Example(_asked(question), answer, expected, answer == expected)
        for question, answer in zip(chosen, given, strict=True)
        for expected in [_expected(question)]
    )
    return Score(len(examples), sum(example.matched for example in examples), examples)


def samples(
    questions: Sequence[Question], before: Sequence[str], after: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of `samples.json`: what was asked, both answers, and the reference."""
    return [
        {"prompt": _asked(each), "before": old, "after": new, "expected": _expected(each)}
        for each, old, new in zip(questions, before, after, strict=True)
    ]


def _asked(question: Question) -> str:
    """The prompt, or the last message before the answer."""
    if isinstance(question, Completion):
        return question.prompt
    return str(question.messages[-2]["content"])


def _expected(question: Question) -> str:
    if isinstance(question, Completion):
        return question.completion.strip()
    return str(question.messages[-1]["content"]).strip()


def _check(questions: Sequence[Question]) -> None:
    if not questions:
        raise FinetuneError("nothing to evaluate: no questions were given")
    problems = [
        f"question {i}: {problem}"
        for i, question in enumerate(questions)
        if (problem := _unanswerable(question)) is not None
    ]
    if problems:
        raise FinetuneError(*problems)


def _unanswerable(question: Question) -> str | None:
    """Why there is no reference in words to compare with; None where there is one."""
    if isinstance(question, Completion):
        return None
    if len(question.messages) < 2 or question.messages[-1]["role"] != "assistant":
        return "needs a question and, at its end, an assistant message to compare with"
    if not question.messages[-1].get("content"):
        return "its last assistant message calls a tool and says nothing to compare with"
    return None


def references(data: Data) -> list[Question]:
    """Questions of a data source, each with an answer to compare with.

    Raises:
        FinetuneError: the source cannot be read, or a row has no such answer.
    """
    find_format(data.format)
    rows: list[Question] = []
    for row in find_source(data).rows():
        try:
            sample = read_row(data.format, row.value)
        except RowProblem as problem:
            raise FinetuneError(f"{row.place}: {problem}") from None
        if sample is None:
            continue
        if not isinstance(sample, Conversation | Completion):
            raise FinetuneError(f"{row.place}: a text has no answer to compare with")
        if (problem := _unanswerable(sample)) is not None:
            raise FinetuneError(f"{row.place}: {problem}")
        rows.append(sample)
        if data.first is not None and len(rows) >= data.first:
            break
    _check(rows)
    return rows
