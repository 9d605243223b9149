"""Exact match: the share of greedy answers that equal the reference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from finetune.errors import FinetuneError, refuse
from finetune.evaluation.generations import Asking, ask
from finetune.evaluation.questions import Asked, Question, references, text_reference_problem
from finetune.inference.generate import Loaded

__all__ = ["Example", "Score", "exact_match", "references", "samples"]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with the model's answer and the reference."""

    prompt: str
    answer: str
    expected: str
    matched: bool
    cut: bool = False
    """Whether the answer reached the maximum number of tokens."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Exact match over a list of questions."""

    rows: int
    matched: int
    examples: tuple[Example, ...]
    """All rows in order."""

    @property
    def share(self) -> float:
        """Share of rows that matched, from 0 to 1."""
        return self.matched / self.rows

    @property
    def cut(self) -> int:
        """Number of answers truncated by the token limit."""
        return sum(example.cut for example in self.examples)


def exact_match(
    loaded: Loaded,
    questions: Sequence[Question],
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> Score:
    """Compare greedy answers with the references, both stripped of outer whitespace.

    Text that the template adds before an answer, such as an empty thinking block, is removed.

    Raises:
        FinetuneError: there are no questions, or one has no text as its reference.
    """
    questions = questions[:limit]
    if not questions:
        raise FinetuneError("nothing to evaluate: no questions were given")
    refuse(
        f"question {number}: {problem}"
        for number, question in enumerate(questions)
        if (problem := text_reference_problem(question)) is not None
    )
    answered = ask(loaded, questions, Asking(max_new_tokens, batch_rows)).given
    examples = tuple(
        Example(each.prompt, given.text, each.expected, given.text == each.expected, given.cut)
        for each, given in zip(map(Asked, questions), answered, strict=True)
    )
    return Score(len(examples), sum(example.matched for example in examples), examples)


def samples(
    questions: Sequence[Question], before: Sequence[str], after: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of `samples.json`: the prompt with its images, both answers, and the reference."""
    return [
        {
            "prompt": each.prompt,
            **each.pictures,
            "before": old,
            "after": new,
            "expected": each.expected,
        }
        for each, old, new in zip(map(Asked, questions), before, after, strict=True)
    ]
