"""Sample types that formats produce from rows: conversations, completions, texts, pairs, prompts.

A method declares the kind of samples that it takes (`READ_AS`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.chat.messages import Message, Turns
from finetune.data.chat.tools import template_kwargs_of, tools_of
from finetune.data.images.image_file import ImageFile, with_images
from finetune.data.values import Raw, RowProblem, is_given, text_if_given
from finetune.recipe import Kind

CONVERSATION = ("system", "tools", "functions", "chat_template_kwargs", "images", "image")
"""Optional columns that every conversation format reads."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the chat form of Hugging Face, with `tool_calls` and `tool` roles.

    A message with images has a `PLACE` for each in its text, and the files in `images`.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant may call."""
    given: int = 0
    """Number of leading messages that are context: their assistant turns are not trained."""
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages that are context only (`weight: 0`)."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets."""

    @property
    def images(self) -> tuple[ImageFile, ...]:
        """The images of all messages, in order."""
        return tuple(each for message in self.messages for each in message.get("images", ()))


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as plain text, without a chat template."""

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
    """One prompt with two answers, as two sequences that both begin with the prompt."""

    chosen: Conversation | Completion
    """The prompt and the preferred answer; `given` counts the prompt's messages."""
    rejected: Conversation | Completion
    """The same prompt and the rejected answer."""
    margin: float = 0.0
    """Margin that the difference of the two rewards should exceed."""


@dataclass(frozen=True)
class Several:
    """Several samples of one row: pairs of more than two answers, or the instances of a task."""

    samples: tuple[Preference | Conversation, ...]


@dataclass(frozen=True)
class Judged:
    """A prompt with an answer that is labelled as wanted or unwanted."""

    answer: Conversation | Completion
    wanted: bool


@dataclass(frozen=True)
class Labelled:
    """A sequence with its label."""

    sequence: Plain
    label: Any
    """A class, a list of classes, or a number, as stored in the file."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that the model answers during training, with the columns that rewards read."""

    asked: Conversation | Completion
    """Messages for the assistant to answer, or a text to continue."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; those with JSON types are passed to the reward."""


Sample = Plain | Preference | Several | Judged | Labelled | Prompt

READ_AS: dict[Kind, tuple[Kind, ...]] = {
    "text": ("text", "judged"),
    "pairs": ("pairs",),
    "judged": ("judged", "pairs"),
    "labelled": ("labelled",),
    "prompts": ("prompts",),
}
"""Kinds of samples that formats may give, by the kind that the method takes: see `as_kind`."""


def as_kind(sample: Sample, kind: Kind) -> tuple[Sample, ...]:
    """Convert a sample to the kind that a method takes.

    A pair becomes two judged answers. A wanted answer becomes a text; an unwanted one is dropped.

    Raises:
        RowProblem: several pairs of one row, whose answers are better than some and worse than
            others, for a method that judges each answer alone.
    """
    match sample:
        case Several() if kind == "judged":
            raise RowProblem(
                "its answers are compared with each other, and the method needs each to be wanted "
                "or not; use format 'ranked', which takes the best and the worst"
            )
        case Several():
            return sample.samples
        case Judged() if kind == "text":
            return (sample.answer,) if sample.wanted else ()
        case Preference() if kind == "judged":
            return Judged(sample.chosen, True), Judged(sample.rejected, False)
        case _:
            return (sample,)


def samples_of(sample: Sample) -> tuple[Sample, ...]:
    """The samples that one row gave: several pairs or conversations, or one of any kind."""
    return sample.samples if isinstance(sample, Several) else (sample,)


def sequences_of(sample: Sample) -> tuple[Plain, ...]:
    """The sequences that a sample consists of."""
    match sample:
        case Preference():
            return sample.chosen, sample.rejected
        case Several():
            return tuple(each for part in sample.samples for each in sequences_of(part))
        case Judged():
            return (sample.answer,)
        case Labelled():
            return (sample.sequence,)
        case Prompt():
            return (sample.asked,)
        case _:
            return (sample,)


def answers(sample: Plain) -> list[bool]:
    """Whether there is something in each answer of a sequence that is trained."""
    match sample:
        case Conversation():
            return [
                bool(message["content"].strip()) or "tool_calls" in message
                for number, message in enumerate(sample.messages)
                if message["role"] == "assistant"
                and number >= sample.given
                and number not in sample.untrained
            ]
        case Completion():
            return [bool(sample.completion.strip())]
        case Text():
            return [bool(sample.text.strip())]


def cut_to(sample: Conversation, messages: int) -> Conversation:
    """The first messages of a conversation."""
    return dataclasses.replace(sample, messages=sample.messages[:messages])


def with_files_in(sample: Any, folder: Path) -> Any:
    """A sample whose images with relative paths are in a folder: that of its file."""
    match sample:
        case Conversation() if sample.images:
            messages = (
                {**each, "images": tuple(file.within(folder) for file in each["images"])}
                if "images" in each
                else each
                for each in sample.messages
            )
            return dataclasses.replace(sample, messages=tuple(messages))
        case tuple():
            return tuple(with_files_in(each, folder) for each in sample)
        case Preference() | Several() | Judged() | Labelled() | Prompt():
            names = [each.name for each in dataclasses.fields(sample)]
            inside = {name: with_files_in(getattr(sample, name), folder) for name in names}
            return dataclasses.replace(sample, **inside)
        case _:
            return sample


def with_message(sample: Conversation, number: int, message: Message) -> Conversation:
    """A conversation with another message in one place."""
    messages = list(sample.messages)
    messages[number] = message
    return dataclasses.replace(sample, messages=tuple(messages))


def conversation_of(row: Raw, turns: Turns, given: int = 0) -> Conversation:
    """A conversation from turns and the row's other columns (`CONVERSATION`)."""
    messages, untrained = turns.messages, turns.untrained
    system = text_if_given(row, "system")
    if system:
        if _repeats_system(system, messages):
            system = ""
        if system:
            messages = ({"role": "system", "content": system}, *messages)
            untrained = frozenset(number + 1 for number in untrained)
            given += given > 0
    messages = with_images(messages, row)
    return Conversation(messages, tools_of(row), given, untrained, template_kwargs_of(row))


def refuse_beside_text(row: Raw, what: str, instead: str) -> None:
    """Refuse columns that only a conversation has, in a row of bare text."""
    lost = next((name for name in CONVERSATION if is_given(row.get(name))), None)
    if lost is not None:
        raise RowProblem(f"column '{lost}' belongs to a conversation, but {what}; {instead}")


def _repeats_system(system: str, messages: tuple[Message, ...]) -> bool:
    """Whether a message repeats the system prompt of the column.

    Raises RowProblem if there is a system message with a different text.
    """
    system_turns = [each for each in messages if each["role"] in ("system", "developer")]
    if system_turns and [each["content"] for each in system_turns] != [system]:
        raise RowProblem(
            "the row has a column 'system' and a system message with a different text; keep one of "
            'them, or leave the column out: columns={"system": null}'
        )
    return bool(system_turns)


def instruction_of(instruction: str, given: str) -> str:
    """The user's message: the instruction, followed by its input if there is one."""
    return f"{instruction}\n\n{given}" if given else instruction
