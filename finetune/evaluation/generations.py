"""Generate answers with a loaded model or a server, from the prompt tokens of training."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from finetune.data.chat.render import Chat
from finetune.data.chat.tokens import Row as Prompt
from finetune.data.chat.written_calls import call_form
from finetune.data.samples import Completion, Conversation
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.evaluation.questions import Question
from finetune.inference.decoder import Row
from finetune.inference.endpoint import Endpoint
from finetune.inference.generate import Loaded, continue_ids, new_text, turn
from finetune.process.progress import counted

__all__ = ["Answer", "Answers", "Asking", "ask", "prompt_of"]


@dataclasses.dataclass(frozen=True)
class Asking:
    """Generation settings."""

    max_new_tokens: int = 256
    batch_rows: int = 8
    temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of a model."""

    text: str
    cut: bool
    """Whether it reached the maximum number of tokens."""
    tokens: int
    calls: tuple[dict[str, Any], ...] | None = None
    """Tool calls that a server returned, or that were parsed from the text; None without calls."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers in the order of their questions."""

    given: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over all rows."""
        tokens = sum(each.tokens for each in self.given)
        return tokens / self.seconds if self.seconds else 0.0


def ask(model: Loaded | Endpoint, questions: Sequence[Question], asking: Asking) -> Answers:
    """Answers to questions; greedy at temperature 0.

    Text that the template adds before an answer, such as an empty thinking block, is removed.

    Raises:
        FinetuneError: a question does not fit into the context, a conversation needs a chat
            template, or the server does not answer.
    """
    started = time.perf_counter()
    if isinstance(model, Endpoint):
        given = [
            _served(model, each, asking)
            for each in counted(questions, "asking", len(questions), "questions")
        ]
    else:
        given = _generated(model, questions, asking)
    return Answers(tuple(given), time.perf_counter() - started)


def _generated(loaded: Loaded, questions: Sequence[Question], asking: Asking) -> list[Answer]:
    chat = loaded.chat()
    if chat.template is None and any(isinstance(each, Conversation) for each in questions):
        raise FinetuneError("the tokenizer has no chat template; train with model.chat_template")
    prompts = [prompt_of(chat, question) for question in questions]
    found = continue_ids(
        loaded, prompts, asking.max_new_tokens, asking.batch_rows, asking.temperature
    )
    answers = answers_of(chat, found)
    calls = _calls(chat, questions, [answer.text for answer in answers])
    return [
        dataclasses.replace(answer, calls=of_text)
        for answer, of_text in zip(answers, calls, strict=True)
    ]


def answers_of(chat: Chat, rows: Sequence[Row]) -> list[Answer]:
    """The answers of continued rows, without text that the template adds before an answer."""
    scaffold = turn(chat.tokenizer).scaffold.strip() if chat.template is not None else ""
    texts = [new_text(chat.tokenizer, list(row.prompt), row.text_ids).strip() for row in rows]
    return [
        Answer(text.removeprefix(scaffold).strip(), not row.stopped, len(row.text_ids))
        for text, row in zip(texts, rows, strict=True)
    ]


def _calls(
    chat: Chat, questions: Sequence[Question], texts: Sequence[str]
) -> list[tuple[dict[str, Any], ...] | None]:
    """Tool calls of each answer, parsed in the format of the template; None without calls."""
    asked = [question.tools if isinstance(question, Conversation) else () for question in questions]
    form = call_form(chat) if any(asked) else None
    if form is None:
        return [None] * len(texts)
    return [
        tuple({"name": call.name, "arguments": call.arguments} for call in form.read(text, tools))
        or None
        for text, tools in zip(texts, asked, strict=True)
    ]


def prompt_of(chat: Chat, question: Question) -> Prompt:
    """Token ids of a question without its reference answer, and its images among them."""
    if isinstance(question, Completion):
        ids = chat.prompt(question)
        return Prompt(ids, [False] * len(ids))
    asked = dataclasses.replace(question, messages=question.messages[:-1])
    try:
        return chat.prompt_row(asked)
    except RowProblem as problem:
        raise FinetuneError(f"a row cannot be asked: {problem}") from None


def _served(endpoint: Endpoint, question: Question, asking: Asking) -> Answer:
    limits = {"max_tokens": asking.max_new_tokens, "temperature": asking.temperature}
    if isinstance(question, Completion):
        reply = endpoint.complete(question.prompt, **limits)
    else:
        tools = {"tools": list(question.tools)} if question.tools else {}
        variables = dict(question.template_kwargs)
        more = {"chat_template_kwargs": variables} if variables else {}
        reply = endpoint.chat(question.messages[:-1], **limits, **tools, **more)
    return Answer(reply.text.strip(), reply.cut, reply.tokens, reply.calls)
