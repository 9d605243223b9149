"""Data formats by name; each has a function that converts a row of a file to a sample."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from finetune import extensions
from finetune.data.chat.messages import (
    Message,
    Turns,
    history_of,
    messages_of,
    sharegpt_turns,
    unread_part_keys,
    with_call_ids,
)
from finetune.data.preferences import (
    read_alpaca_preference,
    read_hh,
    read_preference,
    read_ranked,
    read_ranked_all,
    read_ranked_best,
    read_sharegpt_preference,
)
from finetune.data.prompts import read_prompt
from finetune.data.read.columns import (
    ANSWERS,
    guesses,
    ignored_meaning,
    rename,
    verdict,
)
from finetune.data.samples import (
    CONVERSATION,
    READ_AS,
    Completion,
    Conversation,
    Judged,
    Labelled,
    Plain,
    Sample,
    Several,
    Text,
    answers,
    conversation_of,
    instruction_of,
    refuse_beside_text,
    sequences_of,
)
from finetune.data.values import (
    Raw,
    RowProblem,
    Unreadable,
    is_given,
    kind_of,
    list_of,
    number_in,
    shown,
    text_if_given,
    text_of,
)
from finetune.errors import FinetuneError, did_you_mean
from finetune.recipe import Kind


@dataclass(frozen=True)
class Format:
    """Converts rows to samples."""

    columns: tuple[tuple[str, ...], ...]
    """Alternative sets of required columns."""
    read: Callable[[Raw], Sample | None]
    """Converts a row with the required columns to a sample, or to None if the row is skipped.
    Raises RowProblem."""
    optional: tuple[str, ...] = ()
    """Optional columns."""
    needs: str = ""
    """Description of the required columns, for formats with many alternatives."""
    gives: Kind = "text"
    """Kind of the samples."""
    reads_all: bool = False
    """Whether all other columns are kept as well."""

    def needed(self, columns: Iterable[str]) -> tuple[str, ...]:
        """The largest required set that is complete in `columns`; empty if none is."""
        there = set(columns)
        complete = [needed for needed in self.columns if there.issuperset(needed)]
        return max(complete, key=len, default=())

    def reads(self, columns: Iterable[str]) -> frozenset[str]:
        """The columns that the format reads in a row with `columns`."""
        if self.reads_all:
            return frozenset(columns)
        return frozenset((*self.needed(columns), *self.optional))


def find_format(name: str) -> Format:
    """Find a format by name or `module:attribute`; raises FinetuneError with the known names."""
    if name in FORMATS:
        return FORMATS[name]
    if ":" not in name:
        known = ", ".join(sorted(FORMATS))
        raise FinetuneError(
            f"data.format: '{name}' is not a format{did_you_mean(name, FORMATS)} (known: {known})"
        )
    found = extensions.find("data.format", name, FORMATS)
    if not isinstance(found, Format):
        raise FinetuneError(f"data.format: '{name}' is not a finetune.data.formats.Format")
    return found


def read_row(name: str, row: Any) -> Sample | None:
    """Convert a row to a sample; None if the format skips it. Raises RowProblem, with advice."""
    try:
        return _read(name, row)
    except RowProblem as problem:
        raise RowProblem(f"{problem}{advice(name, row)}") from None


def _read(name: str, row: Any) -> Sample | None:
    data_format = find_format(name)
    if isinstance(row, Unreadable):
        raise RowProblem(row.problem)
    if not isinstance(row, Mapping):
        raise RowProblem(f"is {kind_of(row)}, expected an object with columns")
    columns = tuple(column for column, value in row.items() if value is not None)
    needed, read = _reads(name, columns)
    if not needed:
        raise RowProblem(_missing_columns(name, row))
    ignored = ignored_meaning(name, row, read)
    if ignored is not None:
        raise RowProblem(ignored)
    try:
        return data_format.read(row)
    except RecursionError:
        raise RowProblem("is nested too deeply") from None


def unread_columns(name: str, row: Any) -> list[str]:
    """Columns of a row, and keys of parts of its turns, with a value that its format ignores."""
    if not isinstance(row, Mapping):
        return []
    _, read = _reads(name, tuple(column for column, value in row.items() if value is not None))
    unread = [column for column, value in row.items() if column not in read and is_given(value)]
    turns = (row[column] for column in read & row.keys() if isinstance(row[column], list))
    return unread + sorted({key for each in turns for key in unread_part_keys(each)})


@lru_cache(maxsize=1024)
def _reads(name: str, columns: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The required columns of a format that are in `columns`, and all columns that it reads."""
    return find_format(name).needed(columns), find_format(name).reads(columns)


def _missing_columns(name: str, row: Raw) -> str:
    needed = find_format(name).needs or " or ".join(
        " + ".join(f"'{c}'" for c in each) for each in find_format(name).columns
    )
    nulls = (f"'{name}'" + " (null)" * (value is None) for name, value in row.items())
    return f"format '{name}' needs {needed}, the row has {', '.join(nulls) or 'no columns'}"


def advice(wanted: str, row: Any) -> str:
    """Advice to read a row with another format or other names, which was tried; empty if none is.

    It gives what methods that take the wanted format also take.
    """
    found = fitting(row, READ_AS[find_format(wanted).gives], wanted)
    if found is None:
        return ""
    name, columns = found
    with_columns = f" with columns={json.dumps(columns)}" if columns else ""
    return f"; format '{name}' would fit{with_columns}"


def fitting(
    row: Any, kinds: Iterable[Kind], wanted: str = ""
) -> tuple[str, dict[str, str | None]] | None:
    """A format of one of these kinds, with names of columns, that reads a row; None if none does.

    It trains an answer to something, and leaves no other answer out.

    Args:
        row: A row of a file.
        kinds: Kinds of samples that the format may give.
        wanted: The format to prefer where columns have to be renamed.
    """
    if not isinstance(row, Mapping):
        return None
    there = {column for column, value in row.items() if value is not None}
    complete = {name: len(each.needed(there)) for name, each in FORMATS.items()}
    names = sorted(filter(complete.get, complete), key=lambda name: (-complete[name], name))
    for name, columns in [*((name, {}) for name in names), *guesses(row, wanted)]:
        try:
            named = rename(row, columns)
            sample = _read(name, named)
        except (RowProblem, KeyError):
            continue
        if sample is None or find_format(name).gives not in kinds:
            continue
        if {*unread_columns(name, named)}.intersection(ANSWERS):
            continue
        if all(map(_is_answered, sequences_of(sample))):
            return name, columns
    return None


def _is_answered(sequence: Plain) -> bool:
    """Whether a trained answer follows something that is asked; true for texts."""
    if isinstance(sequence, Conversation):
        turns = enumerate(sequence.messages)
        asked = [n for n, turn in turns if turn["role"] == "user" and turn["content"].strip()]
        first = asked[0] if asked else len(sequence.messages)
        sequence = dataclasses.replace(sequence, given=max(sequence.given, first))
    asks = not isinstance(sequence, Completion) or bool(sequence.prompt.strip())
    return asks and any(answers(sequence))


# The formats.


def read_messages(row: Raw) -> Conversation:
    return conversation_of(row, messages_of(row["messages"], "messages"))


def read_sharegpt(row: Raw) -> Conversation:
    return conversation_of(row, sharegpt_turns(row["conversations"], "conversations"))


def read_alpaca(row: Raw) -> Conversation:
    prompt = instruction_of(text_of(row, "instruction"), text_if_given(row, "input"))
    return _exchange(row, prompt, text_of(row, "output"))


def read_question_answer(row: Raw) -> Conversation:
    return _exchange(row, text_of(row, "question"), text_of(row, "answer"))


def read_prompt_completion(row: Raw) -> Conversation | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        instead = "write it into the prompt, or give two lists of messages"
        refuse_beside_text(row, "prompt and completion are bare text", instead)
        return Completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowProblem(
            f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}, "
            "expected two texts or two lists of messages"
        )
    given = messages_of(prompt, "prompt")
    answer = messages_of(completion, "completion")
    messages = with_call_ids([*given.messages, *answer.messages])
    untrained = frozenset(number + len(given.messages) for number in answer.untrained)
    return conversation_of(row, Turns(messages, untrained), len(given.messages))


def read_text(row: Raw) -> Text:
    return Text(text_of(row, "text"))


def read_self_instruct(row: Raw) -> Conversation | Several | None:
    """Read each instance of a task; None (the row is skipped) without instances."""
    found, instruction = list[Conversation](), text_of(row, "instruction")
    for index, each in enumerate(list_of(row["instances"], "instances")):
        if not isinstance(each, Mapping) or "output" not in each:
            raise RowProblem(f"instances[{index}] has no 'output'")
        place = f"instances[{index}]"
        given = text_of(each, "input", place) if is_given(each.get("input")) else ""
        prompt = instruction_of(instruction, given)
        found.append(_exchange(row, prompt, text_of(each, "output", place)))
    if len(found) > 1:
        return Several(tuple(found))
    return found[0] if found else None


def read_oasst(row: Raw) -> Conversation | None:
    """Read the best-ranked path of a message tree, up to its last assistant reply.

    Rank 0 is the best; replies without a rank come last, in order. None (the row is skipped) if
    the path has no assistant reply.
    """
    roles = {"prompter": "user", "assistant": "assistant"}
    node = row["prompt"] if isinstance(row.get("prompt"), Mapping) else row
    messages: list[Message] = []
    while True:
        if not isinstance(node, Mapping) or node.get("role") not in roles:
            raise RowProblem(f"message {len(messages)} of the tree has no role in {list(roles)}")
        messages.append({"role": roles[node["role"]], "content": text_of(node, "text")})
        replies = list_of(node.get("replies") or [], "replies")
        wrong = next((kind_of(reply) for reply in replies if not isinstance(reply, Mapping)), None)
        if wrong is not None:
            raise RowProblem(f"replies contain {wrong}, expected messages")
        replies = [reply for reply in replies if not reply.get("deleted")]
        if not replies:
            break
        node = min(replies, key=_rank)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return Conversation(tuple(messages)) if messages else None


def read_kto(row: Raw) -> Judged:
    """Read an answer whose `label` (or `kto_tag`) says whether it is wanted."""
    given = {name: row[name] for name in ("label", "kto_tag") if row.get(name) is not None}
    wanted = {name: verdict(value) for name, value in given.items()}
    for name, value in wanted.items():
        if value is None:
            raise RowProblem(f"{name} is {shown(row[name])}, expected true or false")
    if len(set(wanted.values())) > 1:
        raise RowProblem("label and kto_tag contradict each other; keep one of them")
    answer = _read_base(row, JUDGED)
    assert isinstance(answer, Conversation | Completion)
    return Judged(answer, any(wanted.values()))


def read_labelled(row: Raw) -> Labelled:
    sequence = _read_base(row, SEQUENCES)
    assert isinstance(sequence, Plain)
    if isinstance(sequence, Conversation) and sequence.untrained:
        raise RowProblem(
            f"message {min(sequence.untrained)} is marked as context only (weight or train), "
            "but the score of the complete conversation is trained; leave the key out"
        )
    return Labelled(sequence, row["label"])


def _read_base(row: Raw, names: tuple[str, ...]) -> Sample | None:
    """Read a row without its label, as the first format that has its columns."""
    there = {column for column, value in row.items() if value is not None}
    return next(FORMATS[name].read(row) for name in names if FORMATS[name].needed(there))


def _exchange(row: Raw, prompt: str, answer: str) -> Conversation:
    """A question and its answer, after the earlier turns of the row's `history`."""
    history = history_of(row)
    question = {"role": "user", "content": prompt}
    turns = (*history, question, {"role": "assistant", "content": answer})
    return conversation_of(row, Turns(turns))


def _rank(reply: Raw) -> float:
    rank = reply.get("rank")
    return float("inf") if rank is None else number_in(rank, "rank")


PAIR = ("chosen", "rejected")
OPENAI = ("input", "preferred_output", "non_preferred_output")
"""Columns of OpenAI's form of pairs."""

JUDGED = ("messages", "sharegpt", "prompt_completion", "alpaca", "question_answer")
"""Formats that may have a label that says whether the answer is wanted."""

SEQUENCES = ("messages", "prompt_completion", "text")
"""Formats that may have a label to learn, the most specific first."""

EXCHANGE = (*CONVERSATION, "history")
COMPARED = (*CONVERSATION, "margin")

FORMATS: dict[str, Format] = {
    "messages": Format((("messages",),), read_messages, CONVERSATION),
    "sharegpt": Format((("conversations",),), read_sharegpt, CONVERSATION),
    "alpaca": Format((("instruction", "output"),), read_alpaca, ("input", *EXCHANGE)),
    "question_answer": Format((("question", "answer"),), read_question_answer, EXCHANGE),
    "prompt_completion": Format((("prompt", "completion"),), read_prompt_completion, CONVERSATION),
    "text": Format((("text",),), read_text),
    "self_instruct": Format((("instruction", "instances"),), read_self_instruct, EXCHANGE),
    "oasst": Format((("message_tree_id", "prompt"), ("text", "role", "replies")), read_oasst),
}
FORMATS["kto"] = Format(
    tuple(
        (*columns, label)
        for name in JUDGED
        for columns in FORMATS[name].columns
        for label in ("label", "kto_tag")
    ),
    read_kto,
    ("input", "label", "kto_tag", *EXCHANGE),
    "'label' (or 'kto_tag') and the columns of " + ", ".join(JUDGED),
    gives="judged",
)
FORMATS |= {
    "preference": Format(
        (("prompt", *PAIR), PAIR, OPENAI), read_preference, COMPARED, gives="pairs"
    ),
    "sharegpt_preference": Format(
        (("conversations", *PAIR),), read_sharegpt_preference, COMPARED, gives="pairs"
    ),
    "alpaca_preference": Format(
        (("instruction", *PAIR),),
        read_alpaca_preference,
        ("input", "margin", *EXCHANGE),
        gives="pairs",
    ),
    "hh": Format((PAIR,), read_hh, ("margin",), gives="pairs"),
    "labelled": Format(
        tuple((*columns, "label") for name in SEQUENCES for columns in FORMATS[name].columns),
        read_labelled,
        CONVERSATION,
        gives="labelled",
    ),
    **{
        name: Format(
            (("prompt", "responses", "ranks"), ("prompt", "responses", "scores")),
            read,
            CONVERSATION,
            gives="pairs",
        )
        for name, read in (
            ("ranked", read_ranked),
            ("ranked_best", read_ranked_best),
            ("ranked_all", read_ranked_all),
        )
    },
}
FORMATS["prompts"] = Format(
    (("prompt",), ("messages",), ("question",)),
    read_prompt,
    CONVERSATION,
    gives="prompts",
    reads_all=True,
)
