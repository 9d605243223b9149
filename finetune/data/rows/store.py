"""Store prepared data: concatenated documents of token ids, and the rows that consist of them.

ids.bin trained.bin     one entry per token, memory-mapped
beside.bin              concatenated JSON of the documents, for prompts only
images.*                images of the documents (`finetune.data.rows.stored_images`)
lengths.npy origins.npy columns/NAME.npy   one entry per document
train/ eval/            the documents of each row: one sample, or those that are packed together
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from finetune.data.images.image_file import PlacedImage
from finetune.data.images.inputs import ImageInputs
from finetune.data.rows.stored_images import Images, ImagesWriter, open_images

Columns = tuple[np.ndarray, np.ndarray]
"""A document: its ids, (tokens,) int32, and which of them are trained, (tokens,) bool."""
AT_ONCE = 1024
"""Documents after which a pass over all documents releases the memory of mapped files."""


@dataclass(frozen=True)
class Documents:
    """Concatenated documents of token ids; document i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: np.ndarray  # (tokens,) int32
    trained: np.ndarray  # (tokens,) bool: whether the token is a training target
    offsets: np.ndarray  # (documents + 1,) int64
    origins: np.ndarray  # (documents, 2) int64: file number, and row number in the file
    columns: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Values of each document from the data, by name, (documents,) fp64."""
    json: np.ndarray | None = None  # (bytes,) uint8
    """For prompts: the reward's input for each document, as concatenated JSON."""
    json_offsets: np.ndarray | None = None  # (documents + 1,) int64
    images: Images | None = None
    """Images of the documents; None without any."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, number: int) -> Columns:
        """Views of a document's ids and its trained tokens."""
        start, end = self.offsets[number], self.offsets[number + 1]
        return self.ids[start:end], self.trained[start:end]

    def images_of(self, number: int) -> list[PlacedImage]:
        """The images of a document, in the order of its tokens."""
        return [] if self.images is None else self.images.of(number)

    def reward_input(self, number: int) -> dict[str, Any]:
        """The reward's input for a prompt: the prompt and its columns."""
        return json.loads(self.reward_text(number))

    def reward_text(self, number: int) -> str:
        """The reward's input for a prompt as JSON."""
        assert self.json is not None
        assert self.json_offsets is not None
        start, end = self.json_offsets[number], self.json_offsets[number + 1]
        return self.json[start:end].tobytes().decode("utf-8", "surrogatepass")

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document.  # (documents,) int64"""
        return np.diff(self.offsets)

    def release(self) -> None:
        """Release the resident memory of mapped files, to bound that of a full pass."""
        for array in (self.ids, self.trained):
            if isinstance(array.base, mmap.mmap):
                array.base.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class TokenColumn:
    """Values of each label of each document."""

    values: np.ndarray  # (labels of all documents,), or (labels of all documents, values)
    offsets: np.ndarray  # (documents + 1,) int64

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Values of some documents, in the given order.  # (labels,) or (labels, values)"""
        parts = [self.values[self.offsets[n] : self.offsets[n + 1]] for n in numbers]
        return np.concatenate([self.values[:0], *parts])

    @classmethod
    def at_labels(cls, documents: Documents, values: np.ndarray) -> "TokenColumn":
        """Select the values at labels from one value for each token, (tokens,)."""
        places = [labelled_places(documents, [number]) for number in range(len(documents))]
        offsets = np.cumsum([0, *map(len, places)])
        return cls(values[np.concatenate([np.empty(0, np.int64), *places])], offsets)


def labelled_places(documents: Documents, numbers: Iterable[int]) -> np.ndarray:
    """Indices of the labels of some documents among all tokens.  # (trained_tokens,) int64"""
    found = [
        documents.offsets[number] + 1 + np.flatnonzero(documents.document(int(number))[1][1:])
        for number in numbers
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


@dataclass(frozen=True)
class Rows:
    """Rows of documents, the unit of a batch; row i is `members[bounds[i]:bounds[i + 1]]`."""

    documents: Documents
    members: np.ndarray  # (documents of all rows,) int64; a document may be in several rows
    bounds: np.ndarray  # (rows + 1,) int64
    packed: bool
    """Whether rows are packed: concatenated documents, each attending only to itself."""
    padding_free: bool = False
    """Whether the rows of a micro-batch are concatenated although they are not packed."""
    share_prompts: bool = False
    """Whether concatenated rows that start with the same prompt share it."""
    image_inputs: ImageInputs | None = None
    """How images become inputs of the model; None for a model that reads text only."""
    prompts: np.ndarray | None = None  # (rows,) int64
    """Number of the prompt of each row, if several rows share one; else None."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Values of each document that are not from the data, by name, (documents,) fp64."""
    token_columns: Mapping[str, TokenColumn] = field(default_factory=dict[str, TokenColumn])
    """Values of each label, by name."""
    step_reference: np.ndarray | None = None  # (steps,) fp64
    """`Recipe.reference_of_step` of each step."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def side_by_side(self) -> bool:
        """Whether the rows of a micro-batch are concatenated in one row of tokens, not padded."""
        return self.packed or self.padding_free

    def numbers(self, index: int) -> np.ndarray:
        """Document numbers of a row."""
        return self.members[self.bounds[index] : self.bounds[index + 1]]

    def row(self, index: int) -> Columns:
        """A row's ids and trained tokens, with its documents concatenated."""
        parts = [self.documents.document(int(number)) for number in self.numbers(index)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([t for _, t in parts])

    @cached_property
    def used(self) -> np.ndarray:
        """Numbers of all documents that occur in a row, ascending.  # (different,) int64"""
        return np.unique(self.members)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row.  # (rows,) int64"""
        if not len(self):
            return np.empty(0, dtype=np.int64)
        return np.add.reduceat(self.documents.lengths[self.members], self.bounds[:-1])

    @cached_property
    def slots(self) -> np.ndarray:
        """Token slots of each row.  # (rows,) int64

        With padding, each document takes as many slots as the row's longest. For rows of one
        document, and without padding, slots are `lengths`.
        """
        if self.side_by_side or not len(self):
            return self.lengths
        longest = np.maximum.reduceat(self.documents.lengths[self.members], self.bounds[:-1])
        return longest * np.diff(self.bounds)

    @cached_property
    def labelled(self) -> np.ndarray:
        """Number of labels of each row.  # (rows,) int64"""
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
    """A hash of the content of rows: tokens, trained tokens, columns, and the order of the rows.

    Documents are read in file order: reading a page loads up to 2 MiB around it into memory, so in
    another order a thousand documents could load the complete file.
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
    if rows.documents.images is not None:
        found.update(rows.documents.images.digests(used))
    return found.hexdigest()


def documents_of_rows(rows: np.ndarray, each: int) -> np.ndarray:
    """Document numbers of rows that have `each` adjacent documents.  # (rows * each,)"""
    return (rows[:, None] * each + np.arange(each)).ravel()


def composed(documents: list[Columns], images: Sequence[Sequence[PlacedImage]] = ()) -> Documents:
    """Documents in memory, without files; `images` are those of each."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    return Documents(
        np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in documents)]),
        np.concatenate([np.empty(0, bool), *(trained for _, trained in documents)]),
        _offsets(lengths),
        np.zeros((len(documents), 2), dtype=np.int64),
        images=Images.of_lists(images) if any(images) else None,
    )


def single_rows(documents: Documents, members: np.ndarray | None = None) -> Rows:
    """Rows of one document each, by default all documents in order."""
    members = np.arange(len(documents)) if members is None else members
    return Rows(documents, members, np.arange(len(members) + 1), packed=False)


def gathered(parts: Sequence[tuple[Rows, np.ndarray]]) -> Rows:
    """Copies of chosen rows of several sets, (rows,) int64 each, as one set in memory."""
    chosen = [(rows, rows.numbers(int(index))) for rows, indices in parts for index in indices]
    sizes = np.array([len(numbers) for _, numbers in chosen], dtype=np.int64)
    found = [(rows.documents, int(number)) for rows, numbers in chosen for number in numbers]
    images = [documents.images_of(number) for documents, number in found]
    made = composed([documents.document(number) for documents, number in found], images)
    columns = {
        name: np.array([documents.columns[name][number] for documents, number in found])
        for name in parts[0][0].documents.columns
    }
    documents = replace(made, columns=columns)
    return replace(
        parts[0][0], documents=documents, members=np.arange(len(found)), bounds=_offsets(sizes)
    )


class DocumentWriter:
    """Writes documents to a folder; keeps only a few numbers per document in memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._files: tuple[IO[bytes], IO[bytes]] = (
            (folder / "ids.bin").open("wb"),
            (folder / "trained.bin").open("wb"),
        )
        self._beside: list[bytes] = []
        self._images = ImagesWriter(folder)
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
        images: Iterable[Iterable[PlacedImage]] = (),
    ) -> None:
        """Append concatenated documents, as in `Documents`, with their lengths, JSON and images."""
        self._images.append(images)
        self._beside += [each.encode("utf-8", "surrogatepass") for each in beside]
        for file, array, kind in zip(self._files, (ids, trained), (np.int32, bool), strict=True):
            file.write(np.ascontiguousarray(array, dtype=kind).data)
        self._lengths.append(lengths)
        self._origins.append(origins)
        for name, values in (columns or {}).items():
            self._columns.setdefault(name, []).append(values)

    def close(self) -> Documents:
        """Write what is still in memory; returns all documents, memory-mapped."""
        for file in self._files:
            file.close()
        self._images.close()
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
    """Open the documents of a folder with memory-mapped tokens."""
    offsets = _offsets(np.load(folder / "lengths.npy"))
    origins = np.load(folder / "origins.npy")
    ids, trained = (
        _mapped(folder / name, kind, int(offsets[-1]))
        for name, kind in (("ids.bin", np.int32), ("trained.bin", bool))
    )
    columns = {path.stem: np.load(path) for path in sorted((folder / "columns").glob("*.npy"))}
    images = open_images(folder)
    if not (folder / "beside.npy").is_file():
        return Documents(ids, trained, offsets, origins, columns, images=images)
    ends = _offsets(np.load(folder / "beside.npy"))
    beside = _mapped(folder / "beside.bin", np.uint8, int(ends[-1]))
    return Documents(ids, trained, offsets, origins, columns, beside, ends, images)


def check_origins(documents: Documents, files: int) -> None:
    """Raise ValueError if a document's file number is not below `files`."""
    origins = documents.origins
    if origins.shape != (len(documents.lengths), 2):
        raise ValueError(f"origins.npy has shape {origins.shape}")
    if len(origins) and not 0 <= origins[:, 0].min() <= origins[:, 0].max() < files:
        raise ValueError(f"origins.npy names a file that is not one of {files}")


def save_rows(rows: Rows, folder: Path) -> None:
    folder.mkdir(parents=True)
    np.save(folder / "members.npy", rows.members)
    np.save(folder / "bounds.npy", rows.bounds)


def open_rows(documents: Documents, folder: Path, packed: bool) -> Rows:
    """Open the rows of a folder that `save_rows` wrote."""
    return Rows(documents, np.load(folder / "members.npy"), np.load(folder / "bounds.npy"), packed)


def _mapped(path: Path, kind: type, size: int) -> np.ndarray:
    if not size:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", shape=(size,))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
