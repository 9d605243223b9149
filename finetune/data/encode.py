"""From rows of a source to documents of token ids, with a tally of what became of them."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from finetune.data.formats import (
    Completion,
    Conversation,
    RowProblem,
    Sample,
    read_row,
    unread_columns,
)
from finetune.data.messages import KNOWN
from finetune.data.render import Chat, Row
from finetune.data.rows import Columns
from finetune.errors import FinetuneError
from finetune.recipe import Batch, Data, Recipe

MOST_PROBLEMS = 10
MOST_PLACES = 1000
HUGE = 1 << 20
"""Characters of a sample that is looked at before it is tokenised, which could take minutes."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file."""

    section: int
    """Number of the recipe's section of data that they belong to."""
    data_format: str
    file: str
    """As an error names it."""
    rows: list[tuple[int, object]]
    """Row numbers with the rows."""
    failure: tuple[str, ...] = ()
    """Why the file could not be read any further behind these rows."""
    drops_bad_rows: bool = False
    """Rows that cannot be read are left out, and are no problem."""


@dataclass
class Tally:
    """What became of the samples of a source."""

    samples: int = 0
    """Rows that were read."""
    passed_over: int = 0
    """Samples that the format leaves out."""
    untrained: int = 0
    """Rows left out because the model would not be trained to say any of their tokens."""
    dropped: int = 0
    """Samples left out for their length."""
    truncated: int = 0
    """Samples cut to length."""
    eaten: int = 0
    """Those of them that lost every token that was to be trained."""
    split: int = 0
    """Samples cut into several rows."""
    empty: int = 0
    """Samples in which nothing is said to train on: the model would learn to end at once."""
    bad: int = 0
    """Rows left out because they could not be read or rendered."""
    empty_turns: int = 0
    """Samples with an empty answer among others."""
    history_thoughts: int = 0
    """Samples with thoughts of earlier turns, which the template leaves out."""
    unserved: int = 0
    """Samples whose last answer begins before the end of the prompt that serving gives."""
    call_ids: int = 0
    """Samples whose ids of tool calls the template refuses, so that they got others."""
    markup_asked: int = 0
    """Samples with special tokens, or a turn's header, in the texts of their prompts."""
    markup_said: int = 0
    """Samples with special tokens, or a turn's header, in the texts of their answers."""
    no_bos: int = 0
    """Samples without the BOS that the tokenizer begins a text with."""
    two_bos: int = 0
    """Samples that begin with two BOS."""
    overlong: int = 0
    """Samples longer than allowed, whatever became of them."""
    longest_sample: int = 0
    """Tokens of the longest sample, before it was cut."""
    longest_place: str = ""
    roles: Counter[str] = field(default_factory=Counter)
    """Messages by role; prompts, completions and texts by these names."""
    columns: Counter[str] = field(default_factory=Counter)
    """Rows with a value in a column that the format does not read, by its name; and messages with
    a key that neither the format nor the template reads."""
    first: dict[str, str] = field(default_factory=dict)
    """The file and row of the first of each of these numbers that is not zero."""

    def note(self, name: str, place: str, times: int = 1) -> None:
        """Count what became of the sample of a place."""
        if times:
            setattr(self, name, getattr(self, name) + times)
            self.first.setdefault(name, place)

    def add(self, other: "Tally") -> None:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = other.first | self.first
        if other.longest_sample > self.longest_sample:
            self.longest_sample, self.longest_place = other.longest_sample, other.longest_place
        self.roles.update(other.roles)
        self.columns.update(other.columns)


COUNTED = (
    "samples", "passed_over", "untrained", "dropped", "truncated", "eaten", "split", "overlong",
    "empty", "bad", "empty_turns", "history_thoughts", "unserved", "call_ids", "markup_asked",
    "markup_said", "no_bos", "two_bos",
)  # fmt: skip
"""The numbers of a tally that are counted over all sources."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out because it could not be read or rendered."""

    file: str
    number: int
    problem: str
    value: object


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk, end to end, and what is known of each."""

    section: int
    file: str
    ids: np.ndarray  # (tokens,) int32
    trained: np.ndarray  # (tokens,) bool
    lengths: np.ndarray  # (documents,) int64
    numbers: np.ndarray  # (documents,) int64: rows of the file
    trained_tokens: np.ndarray  # (documents,) int64
    ended: np.ndarray  # (documents,) bool: the last trained token ends a turn or a text
    digests: np.ndarray  # (documents,) uint64: equal for equal documents
    tally: Tally
    problems: list[tuple[str, str]]
    """Place and problem."""
    bad: list[BadRow]


@dataclass(frozen=True)
class Encoder:
    """All that a process needs in order to encode rows."""

    recipe: Recipe
    chat: Chat

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encode a chunk; problems are noted, not raised."""
        tally, problems, bad = Tally(), list[tuple[str, str]](), list[BadRow]()
        documents, numbers = list[Columns](), list[int]()
        for number, value in chunk.rows:
            place = f"{chunk.file} row {number}"
            own = Tally(samples=1)
            try:
                added = self._encode(chunk.data_format, value, own, place)
            except (RowProblem, FinetuneError) as error:
                told = error.problems if isinstance(error, FinetuneError) else (str(error),)
                if chunk.drops_bad_rows:
                    own = Tally(samples=1)
                    own.note("bad", place)
                    bad.append(BadRow(chunk.file, number, "; ".join(told), value))
                else:
                    problems.extend((place, problem) for problem in told)
                tally.add(own)
                continue
            tally.add(own)
            documents += added
            numbers += [number] * len(added)
        problems.extend(("", problem) for problem in chunk.failure)
        return self._joined(chunk, documents, numbers, tally, problems, bad)

    def _encode(self, data_format: str, value: object, tally: Tally, place: str) -> list[Columns]:
        sample = read_row(data_format, value)
        tally.columns.update(unread_columns(data_format, value))
        if sample is None:
            tally.note("passed_over", place)
            return []
        if isinstance(sample, Conversation):
            tally.columns.update(self._unread_keys(sample))
        texts = _texts(sample)
        tally.roles.update(role for role, _ in texts)
        tally.note("empty", place, _says_nothing(sample))
        tally.note("empty_turns", place, _has_empty_turn(sample))
        for name in self._markup(sample):
            tally.note(name, place)
        batch = self.recipe.batch
        characters = sum(len(text) for _, text in texts)
        if characters > HUGE and batch.overlong in ("error", "drop"):
            # Unicode normalisation makes at most four characters one.
            least = characters // (4 * self._longest_token)
            if least > batch.max_length:
                _note_length(tally, batch, least, f"{place}, which has at least so many")
                tally.note("dropped", place, batch.overlong == "drop")
                return []
        row = self.recipe.encode(sample, self.chat)
        for name in sorted(row.notes):
            tally.note(name, place)
        return fit(row, batch, tally, place)

    def _markup(self, sample: Sample) -> Iterator[str]:
        """The counts of special tokens that a sample holds as text."""
        asked, said = list[str](), list[str]()
        for role, text in _texts(sample):
            (said if role in ("assistant", "completion", "text") else asked).append(text)
        for name, texts in (("markup_asked", asked), ("markup_said", said)):
            if any(map(self.chat.holds_markup, texts)):
                yield name

    def _unread_keys(self, sample: Conversation) -> set[str]:
        """Keys of a row's messages that neither its format nor the template reads."""
        keys = {key for message in sample.messages for key in message.keys() - KNOWN}
        return {f"messages[].{key}" for key in keys if not _mentions(self.chat.template, key)}

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(len(token) for token in self.chat.tokenizer.get_vocab())

    def _joined(
        self,
        chunk: Chunk,
        documents: list[Columns],
        numbers: list[int],
        tally: Tally,
        problems: list[tuple[str, str]],
        bad: list[BadRow],
    ) -> Encoded:
        ends = self.chat.end_tokens
        return Encoded(
            section=chunk.section,
            file=chunk.file,
            ids=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in documents)]),
            trained=np.concatenate([np.empty(0, bool), *(trained for _, trained in documents)]),
            lengths=np.array([len(ids) for ids, _ in documents], dtype=np.int64),
            numbers=np.array(numbers, dtype=np.int64),
            trained_tokens=np.array([t.sum() for _, t in documents], dtype=np.int64),
            ended=np.array([int(ids[t][-1]) in ends for ids, t in documents], dtype=bool),
            digests=np.array([_digest(ids) for ids, _ in documents], dtype=np.uint64),
            tally=tally,
            problems=problems,
            bad=bad,
        )


@lru_cache(maxsize=1024)
def _mentions(template: str | None, key: str) -> bool:
    return template is not None and re.search(rf"\b{re.escape(key)}\b", template) is not None


def _texts(sample: Sample) -> list[tuple[str, str]]:
    """Roles of a sample with what they say."""
    match sample:
        case Conversation():
            return [(message["role"], message["content"]) for message in sample.messages]
        case Completion():
            return [("prompt", sample.prompt), ("completion", sample.completion)]
        case _:
            return [("text", sample.text)]


def _says_nothing(sample: Sample) -> bool:
    """Whether nothing stands where the model is to speak."""
    match sample:
        case Conversation():
            said = [
                message
                for number, message in enumerate(sample.messages)
                if message["role"] == "assistant"
                and number >= sample.given
                and number not in sample.untrained
            ]
            return bool(said) and not any(m["content"].strip() or "tool_calls" in m for m in said)
        case Completion():
            return not sample.completion.strip()
        case _:
            return not sample.text.strip()


def _has_empty_turn(sample: Sample) -> bool:
    """Whether an answer is empty that is trained among others that are not."""
    if not isinstance(sample, Conversation):
        return False
    said = [m for m in sample.messages[sample.given :] if m["role"] == "assistant"]
    empty = [not m["content"].strip() and "tool_calls" not in m for m in said]
    return any(empty) and not all(empty)


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def fit(row: Row, batch: Batch, tally: Tally, place: str) -> list[Columns]:
    """The documents of an encoded sample, as the rule for overlong ones says."""
    columns = (np.array(row.ids, dtype=np.int32), np.array(row.trained, dtype=bool))
    columns[1][:1] = False  # the first token of a row follows nothing
    pieces = [columns]
    if _note_length(tally, batch, len(row.ids), place):
        match batch.overlong:
            case "error":
                return []
            case "drop":
                tally.note("dropped", place)
                return []
            case "truncate":
                tally.note("truncated", place)
                pieces = [(columns[0][: batch.max_length], columns[1][: batch.max_length])]
                tally.note("eaten", place, bool(columns[1].any() and not pieces[0][1].any()))
            case "split":
                tally.note("split", place)
                pieces = list(split(columns, batch.max_length))
    for _, trained in pieces:
        trained[:1] = False
    kept = [piece for piece in pieces if piece[1].any()]
    tally.note("untrained", place, len(pieces) - len(kept))
    return kept


def _note_length(tally: Tally, batch: Batch, length: int, place: str) -> bool:
    """Whether a sample is too long."""
    if length > tally.longest_sample:
        tally.longest_sample, tally.longest_place = length, place
    tally.overlong += length > batch.max_length
    return length > batch.max_length


def split(row: Columns, max_length: int) -> Iterator[Columns]:
    """Pieces of a row that together train each of its tokens once.

    The last token of a piece is also the first of the next one, where it is context only:

        a b c d e f g   max_length 4   ->   a b c d | d e f g
    """
    ids, trained = row
    step = max(1, max_length - 1)
    for start in range(0, max(1, len(ids) - 1), step):
        yield ids[start : start + max_length], trained[start : start + max_length].copy()


class Problems:
    """What is wrong with the data; reading goes on until there is enough to say.

    The same problem of several rows is told once, whatever texts and numbers it quotes.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[str, str]]] = {}  # kind -> place and problem
        self.places = 0

    @property
    def enough(self) -> bool:
        return len(self.found) >= MOST_PROBLEMS or self.places >= MOST_PLACES

    def add(self, place: str, problem: str) -> None:
        kind = _kind(problem) if place else problem
        if len(self.found) < MOST_PROBLEMS or kind in self.found:
            self.found.setdefault(kind, []).append((place, problem))
        self.places += bool(place)

    def add_all(self, problems: Iterable[str]) -> None:
        """Problems that say themselves where they are."""
        for problem in problems:
            self.add("", problem)

    def raise_any(self) -> None:
        """Raise FinetuneError where there is a problem."""
        if not self.found:
            return
        told = []
        for told_of in self.found.values():
            place, problem = told_of[0]
            others = len(told_of) - 1
            more = f" (and {others} more row{'s' * (others > 1)})" if others else ""
            told.append(f"{place}{more}: {problem}" if place else problem)
        if self.enough:
            told.append("reading stopped here; there may be more")
        raise FinetuneError(*told)


def _kind(problem: str) -> str:
    """A problem less what it quotes of a row, and less every number."""
    quoted = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
    return re.sub(r"\d+", "#", re.sub(quoted, "''", problem))


def check_source(data: Data, tally: Tally, rows: int, batch: Batch) -> Iterator[str]:
    """What is wrong with a source as a whole, of which so many rows are left."""
    source, longest = data.source, tally.longest_sample
    if not tally.samples:
        yield f"{source}: it holds no rows"
    elif batch.overlong == "error" and tally.overlong:
        yield (
            f"{source}: {tally.overlong} of {tally.samples} rows are longer than "
            f"batch.max_length={batch.max_length} tokens, the longest {longest} "
            f"({tally.longest_place}); set batch.max_length={longest}, or batch.overlong to "
            "drop, truncate or split"
        )
    elif not rows:
        bad = f", {tally.bad} dropped as bad rows, the first: {tally.first.get('bad')}"
        eaten = f", {tally.eaten} of them because truncation ate their answer"
        yield (
            f"{source}: none of its {tally.samples} rows is left to train on "
            f"({tally.untrained} without a trained token{eaten if tally.eaten else ''}, "
            f"{tally.dropped} longer than batch.max_length={batch.max_length}, "
            f"{tally.passed_over} passed over by format '{data.format}'{bad if tally.bad else ''})"
        )
