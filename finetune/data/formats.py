"""Data formats by name; each has a function that converts a row of a file to a sample."""

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
from finetune.data.columns import (
    ANSWERS,
    columns_hint,
    guess,
    ignored_meaning,
    rename,
    verdict,
)
from finetune.data.labels import SEQUENCES, reader
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
from finetune.data.samples import (
    CONVERSATION,
    Completion,
    Conversation,
    Conversations,
    Judged,
    Sample,
    Text,
    conversation_of,
    instruction_of,
)
from finetune.data.values import (
    Raw,
    RowProblem,
    Unreadable,
    is_given,
    kind_of,
    list_of,
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
    """Convert a row to a sample; None if the format skips it. Raises RowProblem."""
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


def fitting_formats(row: Raw) -> list[str]:
    """Names of the formats that read a row without loss, the most specific first."""
    there = {column for column, value in row.items() if value is not None}
    fits: dict[str, int] = {}
    for name, data_format in FORMATS.items():
        needed = data_format.needed(there)
        whole = ignored_meaning(name, row, data_format.reads(there)) is None
        if name == "text" and there.intersection(ANSWERS):
            continue  # it would train the question and not the answer
        if name in ("labelled", "prompts"):
            continue  # other methods would lose the label, or train no answer
        if name == "hh" and not isinstance(row["chosen"] if needed else None, str):
            continue
        if needed and whole:
            fits[name] = len(needed)
    return sorted(fits, key=lambda name: (-fits[name], name))


def _missing_columns(name: str, row: Raw) -> str:
    needed = find_format(name).needs or " or ".join(
        " + ".join(f"'{c}'" for c in each) for each in find_format(name).columns
    )
    nulls = (f"'{name}'" + " (null)" * (value is None) for name, value in row.items())
    got = ", ".join(nulls) or "no columns"
    fitting = [f"format '{each}' would fit" for each in fitting_formats(row)[:1]]
    instead = "".join(f"; {each}" for each in fitting or _fitting_names(name, row))
    return f"format '{name}' needs {needed}, the row has {got}{instead}"


def _fitting_names(wanted: str, row: Raw) -> list[str]:
    """Advice to read a row with renamed columns, if a format then reads it without loss."""
    guessed = guess(row, wanted)
    if guessed is None:
        return []
    name, columns = guessed
    named = rename(row, columns)
    lost = ignored_meaning(name, named, find_format(name).reads(named))
    return [columns_hint(name, columns)] if lost is None else []


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
        lost = next((name for name in CONVERSATION if is_given(row.get(name))), None)
        if lost is not None:
            raise RowProblem(
                f"column '{lost}' belongs to a conversation, but prompt and completion are bare "
                "text; write it into the prompt, or give two lists of messages"
            )
        return Completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowProblem(
            f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}, "
            "expected two texts or two lists of messages"
        )
    given = messages_of(prompt, "prompt")
    if given.wanted:
        raise RowProblem(
            f"prompt[{min(given.wanted)}] is marked as trained (weight or train), but a prompt is "
            "context; leave the key out, or use format 'messages'"
        )
    answer = messages_of(completion, "completion")
    messages = with_call_ids([*given.messages, *answer.messages])
    untrained = frozenset(number + len(given.messages) for number in answer.untrained)
    return conversation_of(row, Turns(messages, untrained), len(given.messages))


def read_text(row: Raw) -> Text:
    return Text(text_of(row, "text"))


def read_self_instruct(row: Raw) -> Conversation | Conversations | None:
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
        return Conversations(tuple(found))
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
        replies = [_reply(reply) for reply in list_of(node.get("replies") or [], "replies")]
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
    there = {column for column, value in row.items() if value is not None}
    base = next(name for name in JUDGED if find_format(name).needed(there))
    answer = FORMATS[base].read(row)
    assert isinstance(answer, Conversation | Completion)
    return Judged(answer, any(wanted.values()))


def _exchange(row: Raw, prompt: str, answer: str) -> Conversation:
    """A question and its answer, after the earlier turns of the row's `history`."""
    history = history_of(row)
    question = {"role": "user", "content": prompt}
    turns = (*history, question, {"role": "assistant", "content": answer})
    return conversation_of(row, Turns(turns))


def _reply(reply: Any) -> Raw:
    if not isinstance(reply, Mapping):
        raise RowProblem(f"replies contain {kind_of(reply)}, expected messages")
    return reply


def _rank(reply: Raw) -> float:
    rank = reply.get("rank")
    if rank is not None and not isinstance(rank, int | float):
        raise RowProblem(f"rank is {kind_of(rank)}, expected a number")
    return float("inf") if rank is None else rank


PAIR = ("chosen", "rejected")

JUDGED = ("messages", "sharegpt", "prompt_completion", "alpaca", "question_answer")
"""Formats that may have a label that says whether the answer is wanted."""

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
    "preference": Format((("prompt", *PAIR), PAIR), read_preference, COMPARED, gives="pairs"),
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
        reader({name: (FORMATS[name].columns[0], FORMATS[name].read) for name in SEQUENCES}),
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
