"""Data formats by name: one function each, from a row of a file to a sample."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.data.messages import (
    Message,
    Raw,
    RowProblem,
    kind_of,
    list_of,
    messages_of,
    sharegpt_message,
    text_of,
    tools_of,
    with_call_ids,
)
from finetune.errors import FinetuneError, did_you_mean


@dataclass(frozen=True)
class Conversation:
    """Messages in the chat form of Hugging Face, with `tool_calls` and `tool` roles."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant may call."""
    given: int = 0
    """The first so many messages are context: their assistant turns are not trained."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the chat template's variables, before those of the recipe."""


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as bare text without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


Sample = Conversation | Completion | Text


@dataclass(frozen=True)
class Format:
    """How a row becomes a sample."""

    columns: tuple[tuple[str, ...], ...]
    """Sets of columns, any one of which the format can read."""
    read: Callable[[Raw], Sample | None]
    """The sample of a row that has the columns; None for a row that is to be passed over.
    Raises RowProblem."""

    def fits(self, columns: Iterable[str]) -> int:
        """How many columns of the largest readable set are there; 0 when none is complete."""
        there = set(columns)
        return max((len(needed) for needed in self.columns if there.issuperset(needed)), default=0)


def find_format(name: str) -> Format:
    """The format of that name; raises FinetuneError with the known ones."""
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise FinetuneError(
            f"data.format: '{name}' is not a format{did_you_mean(name, FORMATS)} (known: {known})"
        )
    return FORMATS[name]


def read_row(name: str, row: Any) -> Sample | None:
    """The sample of a row, or None where the format passes it over; raises RowProblem."""
    data_format = FORMATS[name]
    if not isinstance(row, Mapping):
        raise RowProblem(f"is {kind_of(row)}, expected an object with columns")
    columns = {column for column, value in row.items() if value is not None}
    if not data_format.fits(columns):
        raise RowProblem(_missing_columns(name, row, columns))
    return data_format.read(row)


def fitting_formats(columns: Iterable[str]) -> list[str]:
    """Names of the formats that can read rows with these columns, the most specific first."""
    there = set(columns)
    fits = {name: data_format.fits(there) for name, data_format in FORMATS.items()}
    return sorted((name for name in fits if fits[name]), key=lambda name: (-fits[name], name))


def _missing_columns(name: str, row: Raw, columns: set[str]) -> str:
    needed = " or ".join(" + ".join(f"'{c}'" for c in each) for each in FORMATS[name].columns)
    nulls = (f"'{name}'" + " (null)" * (value is None) for name, value in row.items())
    got = ", ".join(nulls) or "no columns"
    fitting = fitting_formats(columns)
    instead = f"; format '{fitting[0]}' would fit" if fitting else ""
    return f"format '{name}' needs {needed}, the row has {got}{instead}"


# The formats.


def read_messages(row: Raw) -> Conversation:
    return Conversation(messages_of(row["messages"], "messages"), tools_of(row.get("tools")))


def read_sharegpt(row: Raw) -> Conversation:
    turns = list_of(row["conversations"], "conversations")
    if not turns:
        raise RowProblem("conversations is empty")
    messages: list[Message] = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row, "system")})
    for index, turn in enumerate(turns):
        messages.append(sharegpt_message(turn, f"conversations[{index}]"))
    return Conversation(with_call_ids(messages), tools_of(row.get("tools")))


def read_alpaca(row: Raw) -> Conversation:
    system = text_of(row, "system") if row.get("system") else ""
    given = text_of(row, "input") if row.get("input") else ""
    return _exchange(
        _instruction(text_of(row, "instruction"), given), text_of(row, "output"), system
    )


def read_question_answer(row: Raw) -> Conversation:
    return _exchange(text_of(row, "question"), text_of(row, "answer"))


def read_prompt_completion(row: Raw) -> Conversation | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowProblem(
            f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}, "
            "expected two texts or two lists of messages"
        )
    given = messages_of(prompt, "prompt")
    answer = messages_of(completion, "completion")
    messages = with_call_ids([*given, *answer])
    return Conversation(messages, tools_of(row.get("tools")), given=len(given))


def read_text(row: Raw) -> Text:
    return Text(text_of(row, "text"))


def read_self_instruct(row: Raw) -> Conversation | None:
    """The first instance of a task; tasks without an instance are passed over."""
    instances = list_of(row["instances"], "instances")
    if not instances:
        return None
    if not isinstance(instances[0], Mapping) or "output" not in instances[0]:
        raise RowProblem("instances[0] has no 'output'")
    given = text_of(instances[0], "input") if instances[0].get("input") else ""
    prompt = _instruction(text_of(row, "instruction"), given)
    return _exchange(prompt, text_of(instances[0], "output"))


def read_oasst(row: Raw) -> Conversation | None:
    """The best-ranked path down a tree of messages, as far as its last assistant reply.

    Rank 0 is the best; replies without a rank come last, in their order. A tree in which nobody
    answered is passed over.
    """
    roles = {"prompter": "user", "assistant": "assistant"}
    node = row["prompt"] if isinstance(row.get("prompt"), Mapping) else row
    messages: list[Message] = []
    while True:
        if not isinstance(node, Mapping) or node.get("role") not in roles:
            raise RowProblem(f"message {len(messages)} of the tree has no role of {list(roles)}")
        messages.append({"role": roles[node["role"]], "content": text_of(node, "text")})
        replies = [_reply(reply) for reply in list_of(node.get("replies") or [], "replies")]
        replies = [reply for reply in replies if not reply.get("deleted")]
        if not replies:
            break
        node = min(replies, key=_rank)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return Conversation(tuple(messages)) if messages else None


def read_kto(row: Raw) -> Conversation | None:
    """Messages with a `label`: the wanted ones are learned, the unwanted ones passed over."""
    if not isinstance(row["label"], bool):
        raise RowProblem(f"label is {kind_of(row['label'])}, expected true or false")
    return read_messages(row) if row["label"] else None


def _exchange(prompt: str, answer: str, system: str = "") -> Conversation:
    question = {"role": "user", "content": prompt}
    turns = (question, {"role": "assistant", "content": answer})
    return Conversation(({"role": "system", "content": system}, *turns) if system else turns)


def _instruction(instruction: str, given: str) -> str:
    return f"{instruction}\n\n{given}" if given else instruction


def _reply(reply: Any) -> Raw:
    if not isinstance(reply, Mapping):
        raise RowProblem(f"replies hold {kind_of(reply)}, expected messages")
    return reply


def _rank(reply: Raw) -> float:
    rank = reply.get("rank")
    if rank is not None and not isinstance(rank, int | float):
        raise RowProblem(f"rank is {kind_of(rank)}, expected a number")
    return float("inf") if rank is None else rank


FORMATS: dict[str, Format] = {
    "messages": Format((("messages",),), read_messages),
    "sharegpt": Format((("conversations",),), read_sharegpt),
    "alpaca": Format((("instruction", "output"),), read_alpaca),
    "question_answer": Format((("question", "answer"),), read_question_answer),
    "prompt_completion": Format((("prompt", "completion"),), read_prompt_completion),
    "text": Format((("text",),), read_text),
    "self_instruct": Format((("instruction", "instances"),), read_self_instruct),
    "oasst": Format((("message_tree_id", "prompt"), ("text", "role", "replies")), read_oasst),
    "kto": Format((("messages", "label"),), read_kto),
}
