"""What a format makes of a row: a conversation, a completion, a text, a pair, or a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.data.chat.messages import Message, Turns
from finetune.data.chat.tools import template_kwargs_of, tools_of
from finetune.data.values import Raw, RowProblem, text_of
from finetune.recipe import Kind

CONVERSATION = ("system", "tools", "functions", "chat_template_kwargs")
"""Columns that every format of conversations reads where a row has them."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the chat form of Hugging Face, with `tool_calls` and `tool` roles."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant may call."""
    given: int = 0
    """The first so many messages are context: their assistant turns are not trained."""
    untrained: frozenset[int] = frozenset()
    """Numbers of assistant messages that are context only, as `weight: 0` says."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets."""


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as bare text without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


Plain = Conversation | Completion | Text
"""A sample that is one sequence."""


@dataclass(frozen=True)
class Preference:
    """One prompt with two answers, each behind it as a sequence of its own."""

    chosen: Conversation | Completion
    """With the wanted answer; of a conversation `given` are the messages of the prompt."""
    rejected: Conversation | Completion
    """The same prompt with the unwanted answer."""
    margin: float = 0.0
    """How much better the wanted answer is: what the difference of rewards is to exceed."""


@dataclass(frozen=True)
class Judged:
    """A prompt with an answer that is wanted or not."""

    answer: Conversation | Completion
    wanted: bool


@dataclass(frozen=True)
class Labelled:
    """A sequence with what it is to be judged as."""

    sequence: Plain
    label: Any
    """A class, a list of classes, or a number: as the file has it."""


@dataclass(frozen=True)
class Prompt:
    """What a model is asked while it is trained, and what a reward reads beside its answer."""

    asked: Conversation | Completion
    """Messages that the assistant is to answer, or a text to go on from."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; those of JSON types reach the reward."""


Sample = Plain | Preference | Judged | Labelled | Prompt

READ_AS: dict[Kind, tuple[Kind, ...]] = {
    "text": ("text", "judged"),
    "pairs": ("pairs",),
    "judged": ("judged", "pairs"),
    "labelled": ("labelled",),
    "prompts": ("prompts",),
}
"""Of samples that a method takes, the kinds that formats may give: see `as_kind`."""


def as_kind(sample: Sample, kind: Kind) -> tuple[Sample, ...]:
    """A sample as a method takes it: a pair is two judged answers, a wanted answer is a text."""
    match sample:
        case Judged() if kind == "text":
            return (sample.answer,) if sample.wanted else ()
        case Preference() if kind == "judged":
            return Judged(sample.chosen, True), Judged(sample.rejected, False)
        case _:
            return (sample,)


def sequences_of(sample: Sample) -> tuple[Plain, ...]:
    """The sequences that a sample consists of."""
    match sample:
        case Preference():
            return sample.chosen, sample.rejected
        case Judged():
            return (sample.answer,)
        case Labelled():
            return (sample.sequence,)
        case Prompt():
            return (sample.asked,)
        case _:
            return (sample,)


def conversation_of(row: Raw, turns: Turns, given: int = 0) -> Conversation:
    """A conversation with what a row says of it beside its turns."""
    messages, untrained = turns.messages, turns.untrained
    if row.get("system"):
        system = text_of(row, "system")
        if _is_told_by_a_turn(system, messages):
            system = ""
        if system:
            messages = ({"role": "system", "content": system}, *messages)
            untrained = frozenset(number + 1 for number in untrained)
            given += given > 0
    return Conversation(messages, tools_of(row), given, untrained, template_kwargs_of(row))


def _is_told_by_a_turn(system: str, messages: tuple[Message, ...]) -> bool:
    """Whether the system prompt of a column is a message too; raises RowProblem for another one."""
    told = [each for each in messages if each["role"] in ("system", "developer")]
    if told and [each["content"] for each in told] != [system]:
        raise RowProblem(
            "the row has a column 'system' and a system message with another text; keep one of "
            'them, or leave the column out: columns={"system": null}'
        )
    return bool(told)


def instruction_of(instruction: str, given: str) -> str:
    """What the user says, with what it is about behind it."""
    return f"{instruction}\n\n{given}" if given else instruction
