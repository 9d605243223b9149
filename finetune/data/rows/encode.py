"""Encode rows of a source as documents of token ids, and tally what happened to them."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

import numpy as np

from finetune.data.chat.chat_templates import fewest_tokens
from finetune.data.chat.messages import LOST, further_keys
from finetune.data.chat.render import Chat
from finetune.data.formats import read_row, unread_columns
from finetune.data.images.image_file import PLACE, PlacedImage
from finetune.data.rows.example import Example
from finetune.data.rows.store import Columns
from finetune.data.samples import (
    Completion,
    Conversation,
    Plain,
    Prompt,
    Sample,
    answers,
    as_kind,
    sequences_of,
    with_files_in,
)
from finetune.data.tally import Tally
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.recipe import Batch, Recipe

Images = list[PlacedImage]
Numbered = tuple[tuple[Columns, ...], Mapping[str, float], str | None, tuple[Images, ...]]
"""The documents of a row, its values for the method's `columns`, a reward's input as JSON, and the
images of each document."""
HUGE = 1 << 20
"""Characters above which a sample is checked before tokenization, which could take minutes."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file."""

    section: int
    """Index of the data section that the rows belong to."""
    data_format: str
    file: str
    """The file's name, as shown in errors."""
    rows: list[tuple[int, object]]
    """Row numbers with the rows."""
    failure: tuple[str, ...] = ()
    """Why the file could not be read after these rows."""
    drops_bad_rows: bool = False
    """Whether rows that cannot be read are dropped instead of reported as problems."""


@dataclass(frozen=True)
class BadRow:
    """A row that was dropped because it could not be read or rendered."""

    file: str
    number: int
    problem: str
    value: object


@dataclass(frozen=True)
class Encoded:
    """The concatenated documents of a chunk, with values of each.

    The documents of a row are adjacent; each row has `documents_per_row`, as the method defines.
    """

    section: int
    file: str
    ids: np.ndarray  # (tokens,) int32
    trained: np.ndarray  # (tokens,) bool
    lengths: np.ndarray  # (documents,) int64
    numbers: np.ndarray  # (documents,) int64: rows of the file
    trained_tokens: np.ndarray  # (documents,) int64
    ended: np.ndarray  # (documents,) bool: the last trained token ends a turn or a text
    digests: np.ndarray  # (documents,) uint64: equal for equal documents of equal rows
    columns: dict[str, np.ndarray]  # (documents,) fp64 each, by the method's `columns`
    beside: list[str]
    """The reward's input for each prompt, as JSON; empty for other samples."""
    images: list[Images]  # (documents,)
    """Images of each document; empty if the model reads text only."""
    tally: Tally
    problems: list[tuple[str, str]]
    """Place and problem."""
    bad: list[BadRow]


@dataclass(frozen=True)
class Encoder:
    """Encodes chunks of rows; can be sent to another process."""

    recipe: Recipe
    chat: Chat

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encode a chunk; problems are collected, not raised."""
        tally, problems, bad = Tally(), list[tuple[str, str]](), list[BadRow]()
        rows, numbers = list[Numbered](), list[int]()
        read = [(number, value, self._read(chunk, value)) for number, value in chunk.rows]
        whole = [sample for _, _, sample in read if self._is_encoded_ahead(sample)]
        with self.chat.ahead(whole):
            for number, value, sample in read:
                place = f"{chunk.file} row {number}"
                own = Tally() if chunk.drops_bad_rows else tally
                tally.counts["samples"] += 1
                try:
                    if isinstance(sample, RowProblem):
                        raise sample
                    own.columns.update(unread_columns(chunk.data_format, value))
                    added = self._encode(sample, own, place)
                except (RowProblem, FinetuneError) as error:
                    reasons = error.problems if isinstance(error, FinetuneError) else (str(error),)
                    if chunk.drops_bad_rows:
                        why = "; ".join(reasons)
                        tally.note("bad", f"{place}: {why}")
                        bad.append(BadRow(chunk.file, number, why, value))
                    else:
                        problems.extend((place, problem) for problem in reasons)
                    continue
                if own is not tally:
                    tally.add(own)
                rows += added
                numbers += [number] * len(added) * self.recipe.documents_per_row
        problems.extend(("", problem) for problem in chunk.failure)
        return self._joined(chunk, rows, numbers, tally, problems, bad)

    def _read(self, chunk: Chunk, value: object) -> Sample | RowProblem | None:
        """The sample of a row, or the problem with the row."""
        try:
            sample = read_row(chunk.data_format, value)
        except RowProblem as problem:
            return problem
        return with_files_in(sample, Path(chunk.file).parent) if self.chat.images else sample

    def _is_encoded_ahead(self, sample: Sample | RowProblem | None) -> TypeGuard[Sample]:
        """Whether a sample is small enough to be tokenized without a check of its length."""
        if sample is None or isinstance(sample, RowProblem):
            return False
        return sum(len(text) for _, text in _texts(sample)) <= HUGE

    def _encode(self, sample: Sample | None, tally: Tally, place: str) -> list[Numbered]:
        samples = () if sample is None else as_kind(sample, self.recipe.takes)
        tally.note("passed_over", place, not samples)
        return [row for each in samples for row in self._encode_one(each, tally, place)]

    def _encode_one(self, sample: Sample, tally: Tally, place: str) -> list[Numbered]:
        sequences = sequences_of(sample)
        for sequence in sequences:
            if isinstance(sequence, Conversation):
                tally.columns.update(self._unread_keys(sequence))
        texts = _texts(sample)
        tally.roles.update(role for role, _ in texts)
        if self.chat.images:
            places = (role for role, text in texts for _ in range(text.count(PLACE)))
            tally.roles.update(f"images ({role})" for role in places)
        given = [said for said in map(answers, sequences) if False in said]
        if not isinstance(sample, Prompt):
            tally.note("empty", place, any(True not in said for said in given))
        tally.note("empty_turns", place, any(True in said for said in given))
        for name in self._markup(sample):
            tally.note(name, place)
        batch = self._batch
        characters = sum(len(text) for _, text in texts)
        if characters > HUGE and batch.overlong in ("error", "drop"):
            least = int(characters * fewest_tokens(self.chat.tokenizer))
            if least > batch.max_length:
                _note_length(tally, batch, least, f"{place}, a lower bound")
                tally.note("dropped", place, batch.overlong == "drop")
                return []
        example = self.recipe.encode(sample, self.chat)
        assert len(example.sequences) == self.recipe.documents_per_row
        for name in sorted(frozenset().union(*(row.notes for row in example.sequences))):
            tally.note(name, place)
        assert set(example.numbers) == set(self.recipe.columns)
        return [
            (row, example.numbers, example.beside, images_of(example, row))
            for row in fit(example, batch, tally, place)
        ]

    @cached_property
    def _batch(self) -> Batch:
        """The recipe's batch, with the maximum length of a document of the data."""
        return dataclasses.replace(self.recipe.batch, max_length=self.recipe.encoded_length)

    def _markup(self, sample: Sample) -> Iterator[str]:
        """Yield the tally names for special tokens in the text of prompts and of answers."""
        asked, trained_texts = list[str](), list[str]()
        for role, text in _texts(sample):
            (trained_texts if role in ("assistant", "completion", "text") else asked).append(text)
        for name, texts in (("markup_asked", asked), ("markup_said", trained_texts)):
            if any(map(self.chat.holds_markup, texts)):
                yield name

    def _unread_keys(self, sample: Conversation) -> set[str]:
        """Keys of a row's messages that neither the format nor the template reads.

        Raises FinetuneError for a key that changes the meaning of the message.
        """
        unread = [
            (number, key)
            for number, message in enumerate(sample.messages)
            for key in further_keys(message)
            if not self.chat.reads_key(sample, number, key)
        ]
        for number, key in unread:
            if key in LOST:
                raise FinetuneError(
                    f"message {number} has '{key}', which the chat template does not read: "
                    f"{LOST[key]}"
                )
        return {f"messages[].{key}" for _, key in unread}

    def _is_ended(self, ids: np.ndarray) -> bool:
        """Whether trained tokens end with an end token, and white space that a template adds."""
        for token in reversed(ids.tolist()):
            if token in self.chat.end_tokens:
                return True
            if self.chat.tokenizer.decode([token]).strip():
                return False
        return False

    def _joined(
        self,
        chunk: Chunk,
        rows: list[Numbered],
        numbers: list[int],
        tally: Tally,
        problems: list[tuple[str, str]],
        bad: list[BadRow],
    ) -> Encoded:
        documents = [document for row, *_ in rows for document in row]
        each = self.recipe.documents_per_row
        return Encoded(
            section=chunk.section,
            file=chunk.file,
            ids=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in documents)]),
            trained=np.concatenate([np.empty(0, bool), *(trained for _, trained in documents)]),
            lengths=np.array([len(ids) for ids, _ in documents], dtype=np.int64),
            numbers=np.array(numbers, dtype=np.int64),
            trained_tokens=np.array([t.sum() for _, t in documents], dtype=np.int64),
            ended=np.array(
                [
                    self.recipe.head.scored or not t.any() or self._is_ended(ids[t])
                    for ids, t in documents
                ],
                dtype=bool,
            ),
            digests=np.array(
                [d for row, *_, images in rows for d in _digests(row, images)], dtype=np.uint64
            ),
            columns={
                name: np.repeat(np.array([known[name] for _, known, *_ in rows], np.float64), each)
                for name in self.recipe.columns
            },
            beside=[beside for _, _, beside, _ in rows if beside is not None],
            images=[each for *_, of_row in rows for each in of_row] if self.chat.images else [],
            tally=tally,
            problems=problems,
            bad=bad,
        )


def _texts(sample: Sample) -> list[tuple[str, str]]:
    """(role, text) of a sample's messages; the prompt of a pair only once."""
    first, *others = sequences_of(sample)
    return _texts_of(first) + [each for other in others for each in _texts_of(other, answer=True)]


def _texts_of(sequence: Plain, answer: bool = False) -> list[tuple[str, str]]:
    """(role, text) of a sequence's messages, or of its answer only."""
    match sequence:
        case Conversation():
            messages = sequence.messages[sequence.given if answer else 0 :]
            return [(message["role"], message["content"]) for message in messages]
        case Completion():
            parts = [("completion", sequence.completion)]
            return parts if answer else [("prompt", sequence.prompt), *parts]
        case _:
            return [("text", sequence.text)]


def images_of(example: Example, row: tuple[Columns, ...]) -> tuple[Images, ...]:
    """The images of each document of a row, which `fit` cuts only in front of one."""
    return tuple(
        [image for image in sequence.images if image.end <= len(ids)]
        for sequence, (ids, _) in zip(example.sequences, row, strict=True)
    )


def _digests(row: tuple[Columns, ...], images: tuple[Images, ...]) -> list[int]:
    """A hash of each document of a row; equal for the same document of an equal row."""
    parts = [
        ids.tobytes() + "".join(image.digest for image in own).encode()
        for (ids, _), own in zip(row, images, strict=True)
    ]
    whole = b"" if len(parts) == 1 else hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
    return [
        int.from_bytes(hashlib.blake2b(part + whole, digest_size=8).digest(), "little")
        for part in parts
    ]


def fit(example: Example, batch: Batch, tally: Tally, place: str) -> list[tuple[Columns, ...]]:
    """Apply `batch.overlong` to an encoded sample; returns rows of documents.

    The sequences of an example are kept or dropped together.
    """
    row = tuple(
        (np.array(each.ids, dtype=np.int32), np.array(each.trained, dtype=bool))
        for each in example.sequences
    )
    _mark(row, example.scored)
    pieces, most = [row], batch.max_length
    if _note_length(tally, batch, max(len(ids) for ids, _ in row), place):
        match batch.overlong:
            case "error":
                return []
            case "drop":
                tally.note("dropped", place)
                return []
            case "truncate":
                tally.note("truncated", place)
                ends = [_end_before_images(each.images, most) for each in example.sequences]
                pieces = [tuple((i[:end], t[:end]) for (i, t), end in zip(row, ends, strict=True))]
                tally.note("eaten", place, _all_trained(row) and not _all_trained(pieces[0]))
            case "split" if any(each.images for each in example.sequences):
                raise RowProblem(
                    "batch.overlong=split would part this row from its images; use truncate or "
                    "drop, or raise batch.max_length"
                )
            case "split":
                tally.note("split", place)
                (document,) = row  # rules refuse it for rows of several documents
                pieces = [(piece,) for piece in split(document, most)]
    for piece in pieces:
        _mark(piece, example.scored)
    kept = [piece for piece in pieces if example.beside is not None or _all_trained(piece)]
    tally.note("untrained", place, len(pieces) - len(kept))
    different = [piece for piece in kept if not _is_tied(piece)]
    tally.note("tied", place, len(kept) - len(different))
    whole = [row for row in different if max(len(ids) for ids, _ in row) >= batch.min_length]
    tally.note("short", place, len(different) - len(whole))
    return whole


def _end_before_images(images: tuple[PlacedImage, ...], most: int) -> int:
    """Where a document of at most `most` tokens ends, so that no image is cut."""
    return min([most, *(each.start for each in images if each.start < most < each.end)])


def _mark(row: tuple[Columns, ...], scored: bool) -> None:
    """Untrain the first token, which nothing predicts; if scored, train only the last one."""
    for _, trained in row:
        if scored:
            trained[:-1], trained[-1:] = False, True
        else:
            trained[:1] = False


def _all_trained(row: tuple[Columns, ...]) -> bool:
    """Whether each document of a row has a trained token."""
    return all(trained.any() for _, trained in row)


def _is_tied(row: tuple[Columns, ...]) -> bool:
    """Whether a row has several documents that are all equal, so none is preferred."""
    (first, _), *others = row
    return bool(others) and all(np.array_equal(first, ids) for ids, _ in others)


def _note_length(tally: Tally, batch: Batch, length: int, place: str) -> bool:
    """Record a sample's length; returns whether it is too long."""
    if length > tally.longest_sample:
        tally.longest_sample, tally.longest_place = length, place
    tally.counts["overlong"] += length > batch.max_length
    return length > batch.max_length


def split(row: Columns, max_length: int) -> Iterator[Columns]:
    """Split a row into pieces that together train each of its tokens once.

    The last token of a piece is also the first of the next one, where it is only context:

        a b c d e f g   max_length 4   ->   a b c d | d e f g
    """
    ids, trained = row
    step = max(1, max_length - 1)
    for start in range(0, max(1, len(ids) - 1), step):
        yield ids[start : start + max_length], trained[start : start + max_length].copy()
