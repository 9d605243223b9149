"""Prepared data on disk: documents of token ids end to end, and the rows that batches are made of.

ids.bin trained.bin     one entry a token, mapped into memory, never read whole
beside.bin              JSON of each document, end to end, of prompts only
lengths.npy origins.npy columns/NAME.npy   one entry a document
train/ eval/            which documents each row holds: one, or those that share a slot
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

Columns = tuple[np.ndarray, np.ndarray]
"""A document: its ids, (tokens,) int32, and which of them are trained, (tokens,) bool."""
AT_ONCE = 1024
"""Documents of mapped files that a pass over all of them holds in memory."""


@dataclass(frozen=True)
class Documents:
    """Documents of token ids, end to end; document i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: np.ndarray  # (tokens,) int32
    trained: np.ndarray  # (tokens,) bool: the model is trained to say this token
    offsets: np.ndarray  # (documents + 1,) int64
    origins: np.ndarray  # (documents, 2) int64: the number of its file, and of its row there
    columns: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Numbers that the data says of each document, (documents,) fp64, by what they are."""
    json: np.ndarray | None = None  # (bytes,) uint8
    """Of prompts: what a reward is given of each document, as JSON, end to end."""
    json_offsets: np.ndarray | None = None  # (documents + 1,) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, number: int) -> Columns:
        """Views of a document's ids and of its trained tokens."""
        start, end = self.offsets[number], self.offsets[number + 1]
        return self.ids[start:end], self.trained[start:end]

    def beside(self, number: int) -> dict[str, Any]:
        """The columns of a document that is a prompt."""
        assert self.json is not None
        assert self.json_offsets is not None
        start, end = self.json_offsets[number], self.json_offsets[number + 1]
        return json.loads(self.json[start:end].tobytes())

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document.  # (documents,) int64"""
        return np.diff(self.offsets)

    def release(self) -> None:
        """Give back the memory of what was read of mapped files: a pass over all stays small."""
        for array in (self.ids, self.trained):
            if isinstance(array.base, mmap.mmap):
                array.base.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class TokenColumn:
    """Numbers of each label of each document."""

    values: np.ndarray  # (labels of all documents,), or (labels of all documents, numbers)
    offsets: np.ndarray  # (documents + 1,) int64

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Those of some documents, in their order.  # (labels, numbers)"""
        parts = [self.values[self.offsets[n] : self.offsets[n + 1]] for n in numbers]
        return np.concatenate([self.values[:0], *parts])

    @classmethod
    def at_labels(cls, documents: Documents, values: np.ndarray) -> "TokenColumn":
        """Those of a number for every token, (tokens,), that stand at a label."""
        places = [labelled_places(documents, [number]) for number in range(len(documents))]
        offsets = np.cumsum([0, *map(len, places)])
        return cls(values[np.concatenate([np.empty(0, np.int64), *places])], offsets)


def labelled_places(documents: Documents, numbers: Iterable[int]) -> np.ndarray:
    """Places of the labels of some documents among all tokens.  # (trained_tokens,) int64"""
    found = [
        documents.offsets[number] + 1 + np.flatnonzero(documents.document(int(number))[1][1:])
        for number in numbers
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


@dataclass(frozen=True)
class Rows:
    """What a batch counts. Row i holds the documents `members[bounds[i]:bounds[i + 1]]`."""

    documents: Documents
    members: np.ndarray  # (documents of all rows,) int64; a document may be in several rows
    bounds: np.ndarray  # (rows + 1,) int64
    packed: bool
    """A row is a pack: documents side by side, each attending to itself alone."""
    padding_free: bool = False
    """Rows of a micro-batch are side by side too, though none is a pack."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Numbers of every document besides those of the data, (documents,) fp64, by what they are."""
    token_columns: Mapping[str, TokenColumn] = field(default_factory=dict[str, TokenColumn])
    """Numbers of every label, by what they are."""
    step_reference: np.ndarray | None = None  # (steps,) fp64
    """Sums of a reference's log-probabilities of each step's `mismatched` answers."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def side_by_side(self) -> bool:
        """Whether the rows of a micro-batch are side by side in one row of tokens, or padded."""
        return self.packed or self.padding_free

    def numbers(self, index: int) -> np.ndarray:
        """Numbers of the documents in a row."""
        return self.members[self.bounds[index] : self.bounds[index + 1]]

    def row(self, index: int) -> Columns:
        """A row's ids and its trained tokens, its documents end to end."""
        parts = [self.documents.document(int(number)) for number in self.numbers(index)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([t for _, t in parts])

    @cached_property
    def used(self) -> np.ndarray:
        """Numbers of the documents that any row holds, ascending.  # (different,) int64"""
        return np.unique(self.members)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row.  # (rows,) int64"""
        if not len(self):
            return np.empty(0, dtype=np.int64)
        return np.add.reduceat(self.documents.lengths[self.members], self.bounds[:-1])

    @cached_property
    def slots(self) -> np.ndarray:
        """Token slots that each row takes: padded, its documents are as long as the longest.

        (rows,) int64; of rows of one document `lengths`.
        """
        if self.side_by_side or not len(self):
            return self.lengths
        longest = np.maximum.reduceat(self.documents.lengths[self.members], self.bounds[:-1])
        return longest * np.diff(self.bounds)

    @cached_property
    def labelled(self) -> np.ndarray:
        """Tokens of each row that have a label.  # (rows,) int64"""
        if not len(self):
            return np.empty(0, dtype=np.int64)
        used, places = np.unique(self.members, return_inverse=True)
        counts = np.empty(len(used), dtype=np.int64)
        for start in range(0, len(used), AT_ONCE):
            for place, number in enumerate(used[start : start + AT_ONCE].tolist(), start):
                counts[place] = np.count_nonzero(self.documents.document(number)[1][1:])
            self.documents.release()
        return np.add.reduceat(counts[places], self.bounds[:-1])


def digest(rows: Rows) -> str:
    """A hash of what rows are: their tokens, which of them are trained, and their order.

    Documents are read in the order of their file: a page that is read brings up to 2 MiB around it
    into memory, so that in any other order a thousand documents would bring the whole file.
    """
    used, places = np.unique(rows.members, return_inverse=True)
    found = hashlib.sha256(rows.documents.lengths[used].tobytes())
    found.update(places.tobytes())
    found.update(rows.bounds.tobytes())
    for name, values in sorted(rows.documents.columns.items()):
        found.update(name.encode() + values[used].tobytes())
    for start in range(0, len(used), AT_ONCE):
        for number in used[start : start + AT_ONCE]:
            ids, trained = rows.documents.document(int(number))
            found.update(ids.data)
            found.update(trained.data)
        rows.documents.release()
    return found.hexdigest()


def documents_of_rows(rows: np.ndarray, each: int) -> np.ndarray:
    """Numbers of the documents of rows that have `each` neighbouring ones.  # (rows * each,)"""
    return (rows[:, None] * each + np.arange(each)).ravel()


def composed(documents: list[Columns]) -> Documents:
    """Documents in memory, of no file."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    return Documents(
        np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in documents)]),
        np.concatenate([np.empty(0, bool), *(trained for _, trained in documents)]),
        _offsets(lengths),
        np.zeros((len(documents), 2), dtype=np.int64),
    )


def single_rows(documents: Documents, members: np.ndarray | None = None) -> Rows:
    """Rows of one document each, by default all of them in their order."""
    members = np.arange(len(documents)) if members is None else members
    return Rows(documents, members, np.arange(len(members) + 1), packed=False)


class DocumentWriter:
    """Appends documents to a folder; only a few numbers per document stay in memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._files: tuple[IO[bytes], IO[bytes]] = (
            (folder / "ids.bin").open("wb"),
            (folder / "trained.bin").open("wb"),
        )
        self._beside: list[bytes] = []
        self._lengths: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []
        self._columns: dict[str, list[np.ndarray]] = {}

    def append(
        self,
        ids: np.ndarray,
        trained: np.ndarray,
        lengths: np.ndarray,
        origins: np.ndarray,
        columns: Mapping[str, np.ndarray] | None = None,
        beside: Iterable[str] = (),
    ) -> None:
        """Documents end to end, as `Documents` holds them, with their lengths and their JSON."""
        self._beside += [each.encode("utf-8", "surrogatepass") for each in beside]
        for file, array, kind in zip(self._files, (ids, trained), (np.int32, bool), strict=True):
            file.write(np.ascontiguousarray(array, dtype=kind).data)
        self._lengths.append(lengths)
        self._origins.append(origins)
        for name, values in (columns or {}).items():
            self._columns.setdefault(name, []).append(values)

    def close(self) -> Documents:
        """Write what is in memory; returns all documents, mapped."""
        for file in self._files:
            file.close()
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *self._lengths])
        origins = np.concatenate([np.empty((0, 2), dtype=np.int64), *self._origins])
        if self._beside:
            (self.folder / "beside.bin").write_bytes(b"".join(self._beside))
            np.save(self.folder / "beside.npy", np.array([len(each) for each in self._beside]))
        np.save(self.folder / "lengths.npy", lengths.astype(np.int64))
        np.save(self.folder / "origins.npy", origins.astype(np.int64))
        (self.folder / "columns").mkdir()
        for name, parts in self._columns.items():
            np.save(self.folder / "columns" / f"{name}.npy", np.concatenate(parts))
        return open_documents(self.folder)


def open_documents(folder: Path) -> Documents:
    """Documents of a folder: tokens mapped, not read."""
    offsets = _offsets(np.load(folder / "lengths.npy"))
    origins = np.load(folder / "origins.npy")
    ids, trained = (
        _mapped(folder / name, kind, int(offsets[-1]))
        for name, kind in (("ids.bin", np.int32), ("trained.bin", bool))
    )
    columns = {path.stem: np.load(path) for path in sorted((folder / "columns").glob("*.npy"))}
    if not (folder / "beside.npy").is_file():
        return Documents(ids, trained, offsets, origins, columns)
    ends = _offsets(np.load(folder / "beside.npy"))
    beside = _mapped(folder / "beside.bin", np.uint8, int(ends[-1]))
    return Documents(ids, trained, offsets, origins, columns, beside, ends)


def save_rows(rows: Rows, folder: Path) -> None:
    folder.mkdir(parents=True)
    np.save(folder / "members.npy", rows.members)
    np.save(folder / "bounds.npy", rows.bounds)


def open_rows(documents: Documents, folder: Path, packed: bool) -> Rows:
    """The rows of a folder that `save_rows` wrote."""
    return Rows(documents, np.load(folder / "members.npy"), np.load(folder / "bounds.npy"), packed)


def _mapped(path: Path, kind: type, size: int) -> np.ndarray:
    if not size:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", shape=(size,))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
