"""How often a model's greedy answer is exactly the reference."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.chat.render import load_chat
from finetune.data.formats import Completion, Conversation
from finetune.errors import FinetuneError
from finetune.evaluation.questions import Asked, Question, references, unanswerable
from finetune.inference.generate import Loaded, continue_ids, turn

__all__ = ["Example", "Score", "answers", "exact_match", "references", "samples", "score_asked"]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with the model's answer and the reference."""

    prompt: str
    answer: str
    expected: str
    matched: bool
    cut: bool = False
    """Whether the answer was still going on after the most tokens that it may have."""
    source: str = ""
    place: str = ""
    """File and row of the question, where it is from a source."""


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

    @property
    def cut(self) -> int:
        """Answers that the limit of tokens cut."""
        return sum(example.cut for example in self.examples)

    def of_sources(self) -> dict[str, "Score"]:
        """The score of each source."""
        names = dict.fromkeys(example.source for example in self.examples)
        return {name: _score([e for e in self.examples if e.source == name]) for name in names}


def _score(examples: Sequence[Example]) -> Score:
    return Score(len(examples), sum(example.matched for example in examples), tuple(examples))


def answers(
    loaded: Loaded,
    questions: Sequence[Question],
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> list[str]:
    """Greedy answers to questions, asked with the very tokens that training puts before an answer.

    Text that the template itself puts before an answer (an empty block of thought) is left out.
    """
    return [text for text, _ in _answered(loaded, questions, max_new_tokens, batch_rows)]


def _answered(
    loaded: Loaded, questions: Sequence[Question], max_new_tokens: int, batch_rows: int
) -> list[tuple[str, bool]]:
    """Each answer, and whether the limit cut it."""
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
    found = continue_ids(loaded, prompts, max_new_tokens, batch_rows)
    return [(text.strip().removeprefix(scaffold).strip(), cut) for text, cut in found]


def exact_match(
    loaded: Loaded,
    questions: Sequence[Question],
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_rows: int = 8,
) -> Score:
    """Compare greedy answers with the references, both stripped of outer whitespace."""
    chosen = [Asked(question, "", "") for question in questions[:limit]]
    return score_asked(loaded, chosen, max_new_tokens, batch_rows)


def score_asked(
    loaded: Loaded, asked: Sequence[Asked], max_new_tokens: int = 256, batch_rows: int = 8
) -> Score:
    """`exact_match` of questions that say where they are from."""
    given = _answered(loaded, [each.question for each in asked], max_new_tokens, batch_rows)
    return _score([
        Example(
            _asked(each.question), answer, expected, answer == expected, cut, each.source,
            each.place,
        )
        for each, (answer, cut) in zip(asked, given, strict=True)
        for expected in [_expected(each.question)]
    ])  # fmt: skip


def write_samples(score: Score, path: Path) -> None:
    """One JSON object a line: question, answer, reference, and how it went."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(dataclasses.asdict(e), ensure_ascii=False) for e in score.examples)
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise FinetuneError(f"{path}: the samples cannot be written: {error.strerror}") from None


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
        if (problem := unanswerable(question)) is not None
    ]
    if problems:
        raise FinetuneError(*problems)
