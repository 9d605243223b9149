"""Collate rows into the tensors of one forward pass."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from finetune.data.images.image_file import PlacedImage
from finetune.data.images.inputs import ImageInputs
from finetune.data.rows.embedding_noise import Noise
from finetune.data.rows.shared_prompts import computed_once
from finetune.data.rows.store import Columns, Rows

UNTRAINED = -100
"""The label that PyTorch's cross entropy ignores."""
GRAIN, GRAIN_FROM = 64, 1_024
"""On CPUs, a padding-free micro-batch of at least `GRAIN_FROM` tokens is filled up to a multiple of
`GRAIN` tokens: oneDNN generates code for each row count of a matmul, most of it for the rows that
do not fill a block."""


@dataclass(frozen=True)
class Boundaries:
    """Boundaries of documents that are concatenated in one row of tokens."""

    positions: torch.Tensor  # (1, tokens) int64: from 0 in each document; (4, 1, tokens) in space
    ends: torch.Tensor  # (documents + 1,) int32: 0, then the end of each document
    longest: int
    """Tokens of the longest document."""
    numbers: tuple[int, ...]
    """`ends` as Python integers, readable without a device synchronization."""
    document_tokens: torch.Tensor | None = None  # (ends[-1],) int64
    """Index in the row of each token of the documents; None if no prompt is shared."""
    token_places: torch.Tensor | None = None  # (tokens,) int64
    """First place of each token of the row in `document_tokens`; None if no prompt is shared."""


@dataclass(frozen=True)
class DividedDocuments:
    """One process's part of documents whose tokens are divided over a process group."""

    group: torch.distributed.ProcessGroup
    labels: torch.Tensor  # (documents,) int64
    """Number of labels of each document in this part."""
    ended: torch.Tensor  # (ended,) int64
    """Indices of the documents whose last token is in this part."""
    last_places: torch.Tensor  # (ended,) int64
    """Flat index of the last token of each of them."""


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass on one device: padded rows, or concatenated documents."""

    ids: torch.Tensor  # (micro_rows, longest) or (1, tokens) int64
    labels: torch.Tensor  # as ids, int64: the ids where trained, else -100; not shifted
    attention_mask: torch.Tensor | None  # (micro_rows, longest) int64; None when nothing is padded
    rows: int
    """Number of rows; 0 for a dummy batch that only lets a rank join the collectives."""
    trained_tokens: int
    """Number of labels that are not `UNTRAINED`."""
    real_tokens: int
    """Number of tokens that are not padding."""
    boundaries: Boundaries | None = None
    """Boundaries of concatenated documents; None if each row is one document."""
    document_labels: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Number of labels of each document, (documents,) int64; a filler document is not counted."""
    last_places: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Flat index of the last token of each document, (documents,) int64."""
    places: torch.Tensor | None = None  # (trained_tokens,) int64
    """Flat index of the token that predicts each label; None if it is always the one before."""
    token_columns: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Values of each label by name, (trained_tokens,) or (trained_tokens, values per label)."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Values of each document by name, (documents,) fp64."""
    divided: DividedDocuments | None = None
    """This process's part of the documents, if the processes of a group share them. Values of each
    document are then those of the first process; the others have no documents."""
    unpadded: torch.Tensor | None = None  # as attention_mask
    """Mask of rows that were padded to a common shape, after which attention needs none."""
    images: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Inputs for the images, in the order of their tokens, by their names in transformers."""
    noise: Noise | None = None
    """Noise of the embeddings in training; None without any."""
    of_step: Any = None
    """What the method's `before_step` returned for the complete step, on every rank the same."""
    in_step: torch.Tensor | None = None  # (documents,) int64
    """Place of each document among those of the complete step; None without `before_step`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, token slots per row); if rows are concatenated, the mean length, rounded up."""
        rows = max(1, self.rows) if self.boundaries is not None else self.ids.shape[0]
        return rows, -(-self.ids.numel() // rows)

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass, as transformers names them."""
        if self.boundaries is None:
            return {"input_ids": self.ids, "attention_mask": self.attention_mask, **self.images}
        ends, longest = self.boundaries.ends, self.boundaries.longest
        given: dict[str, Any] = {
            "input_ids": self.ids,
            "position_ids": self.boundaries.positions,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
            "document_ends": self.boundaries.numbers,
        }
        if self.boundaries.document_tokens is not None:
            given["document_tokens"] = self.boundaries.document_tokens
            given["token_places"] = self.boundaries.token_places
        return given | self.images

    @property
    def attended(self) -> int:
        """Tokens in attention, where a shared prompt is repeated for each document."""
        return self.ids.numel() if self.boundaries is None else self.boundaries.numbers[-1]


def collate(rows: Rows, indices: np.ndarray, pad_id: int, device: torch.device | str) -> MicroBatch:
    """Collate rows into one micro-batch on a device: padded on the right, or concatenated.

    Padding is identified by its position, never by its id, so `pad_id` may be any token. In a
    concatenated micro-batch, padding is a document of fewer than `GRAIN` tokens, on CPUs only.
    Without indices the result is a row of two untrained tokens, for a rank that must still take
    part in the collectives. Without images it may have a filler: one more document with an image.
    It is untrained and no document sees it, so its gradient is exactly zero.
    """
    lay = _side_by_side if rows.side_by_side else _padded
    if rows.share_prompts and rows.side_by_side:
        lay = functools.partial(_side_by_side, share=True)
    numbers = np.concatenate([np.empty(0, np.int64), *(rows.numbers(int(i)) for i in indices)])
    picked = [rows.documents.document(int(number)) for number in numbers]
    if rows.image_inputs is not None:
        images = [rows.documents.images_of(int(number)) for number in numbers]
        batch = _with_images(lay, picked, images, rows.image_inputs, len(indices), pad_id, device)
    else:
        batch = lay(picked or [_nothing(2, pad_id)], len(indices), pad_id, device)
    known = {**rows.documents.columns, **rows.columns}
    if not known and not rows.token_columns:
        return batch
    of_tokens = {n: _on_device(each.of(numbers), device) for n, each in rows.token_columns.items()}
    columns = {name: _on_device(values[numbers], device) for name, values in known.items()}
    return replace(batch, columns=columns, token_columns=of_tokens)


def _with_images(
    lay: Callable[..., MicroBatch],
    picked: list[Columns],
    images: list[list[PlacedImage]],
    inputs: ImageInputs,
    rows: int,
    pad_id: int,
    device: torch.device | str,
) -> MicroBatch:
    """A micro-batch with the inputs for its images, and for a filler if it has none."""
    is_filled = inputs.everywhere and not any(images)
    picked = picked or [_nothing(2, pad_id)]
    counts = [*map(len, images), *([0] * (len(picked) - len(images)))]
    fillers = list[Columns]()
    if is_filled:
        ids, _ = inputs.processor.filler
        fillers, counts = [(ids, np.zeros(len(ids), dtype=bool))], [*counts, 1]
    batch = lay(picked, rows, pad_id, device, fillers=fillers)
    tensors = inputs.tensors(images, is_filled)
    bounds, documents = batch.boundaries, [ids for ids, _ in [*picked, *fillers]]
    if bounds is not None and (rest := bounds.numbers[-1] - sum(map(len, documents))):
        documents, counts = [*documents, np.full(rest, pad_id)], [*counts, 0]  # up to a multiple
    if bounds is not None and inputs.positions is not None:
        placed = inputs.document_positions(zip(documents, counts, strict=True), tensors)
        bounds = replace(bounds, positions=_on_device(placed.numpy(), device))
    if inputs.token_types is not None:
        types = np.zeros(tuple(batch.ids.shape), np.int64)
        if bounds is not None:
            types[0] = inputs.types(np.concatenate(documents))
        for row, ids in enumerate(documents if bounds is None else ()):
            types[row, : len(ids)] = inputs.types(ids)  # padded on the right, as the ids are
        tensors[inputs.token_types] = torch.from_numpy(types)
    moved = {name: _on_device(value.numpy(), device) for name, value in tensors.items()}
    return replace(batch, images=moved, boundaries=bounds)


def with_noise(
    batch: MicroBatch, rows: Rows, indices: np.ndarray, alpha: float, key: tuple[int, int]
) -> MicroBatch:
    """A micro-batch of `collate`, of the rows `indices`, with noise of a seed and step (`key`)."""
    if not len(indices):
        return batch
    documents = np.concatenate([rows.numbers(int(index)) for index in indices])
    shape, bounds = tuple(batch.ids.shape), batch.boundaries
    tokens = np.zeros((3, batch.ids.numel()), np.int64)
    for number, document in enumerate(documents.tolist()):
        length = int(rows.documents.lengths[document])
        first = number * shape[1] if bounds is None else bounds.numbers[number]
        tokens[:, first : first + length] = np.broadcast_arrays(document, np.arange(length), length)
    return replace(
        batch, noise=Noise(alpha, key, _on_device(tokens, batch.ids.device).view(3, *shape))
    )


def _nothing(tokens: int, pad_id: int) -> Columns:
    """A document that consists of padding."""
    return np.full(tokens, pad_id, dtype=np.int32), np.zeros(tokens, dtype=bool)


def _padded(
    picked: list[Columns],
    rows: int,
    pad_id: int,
    device: torch.device | str,
    fillers: Sequence[Columns] = (),
) -> MicroBatch:
    """Pad each document to the longest one, one row each; fillers are rows that do not count."""
    real = len(picked)
    picked = [*picked, *fillers]
    lengths = [len(ids) for ids, _ in picked]
    shape = (len(picked), max(lengths))
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, UNTRAINED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for place, (row_ids, trained) in enumerate(picked):
        length = lengths[place]
        ids[place, :length] = row_ids
        labels[place, :length] = np.where(trained, row_ids, UNTRAINED)
        mask[place, :length] = 1
    labels[:, 0] = UNTRAINED  # no token predicts the first one
    documents = real if rows else 0
    counts = (labels != UNTRAINED).sum(axis=1)[:documents]
    lasts = np.arange(documents) * shape[1] + np.array(lengths[:documents], dtype=np.int64) - 1
    return MicroBatch(
        ids=_on_device(ids, device),
        labels=_on_device(labels, device),
        attention_mask=_on_device(mask, device) if min(lengths) < max(lengths) else None,
        rows=rows,
        trained_tokens=int(counts.sum()),
        real_tokens=sum(lengths[:documents]),
        document_labels=_on_device(counts, device),
        last_places=_on_device(lasts, device),
    )


def _side_by_side(
    picked: list[Columns],
    rows: int,
    pad_id: int,
    device: torch.device | str,
    share: bool = False,
    fillers: Sequence[Columns] = (),
) -> MicroBatch:
    """Concatenate documents in one row; the first token of each is never a label:

    ids        a b c d | e f | g h i
    positions  0 1 2 3 | 0 1 | 0 1 2
    labels     - b c d | - f | - h i
    ends       0 4 6 9

    With `share`, a prompt is in the row once, where the first document with it is:

    documents  a b c d | a b e | f g      without `share`
    ids        a b c d e f g
    positions  0 1 2 3 2 0 1
    labels     - - c d e - g              predicted from  b c b f
    ends       0 4 7 9                    of the documents without `share`
    document_tokens  0 1 2 3 | 0 1 4 | 5 6
    token_places     0 1 2 3       6   7 8
    """
    tokens, documents = sum(len(ids) for ids, _ in picked), len(picked) if rows else 0
    index = computed_once(picked) if share else None
    computed = tokens if index is None else int(index.max()) + 1
    picked, computed = [*picked, *fillers], computed + sum(len(ids) for ids, _ in fillers)
    if torch.device(device).type == "cpu" and computed >= GRAIN_FROM and computed % GRAIN:
        picked = [*picked, _nothing(-computed % GRAIN, pad_id)]
        filler = np.arange(computed, computed + len(picked[-1][0]))
        index = None if index is None else np.concatenate([index, filler])
    lengths = np.array([len(ids) for ids, _ in picked], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([ids for ids, _ in picked]).astype(np.int64)
    labels = np.where(np.concatenate([trained for _, trained in picked]), ids, UNTRAINED)
    labels[ends[:-1]] = UNTRAINED
    counts = np.add.reduceat(labels != UNTRAINED, ends[:-1], dtype=np.int64)[:documents]
    positions = np.arange(len(ids)) - np.repeat(ends[:-1], lengths)
    lasts, places, shared = ends[1 : documents + 1] - 1, None, dict[str, torch.Tensor]()
    if index is not None:
        places = _on_device(index[np.flatnonzero(labels != UNTRAINED) - 1], device)
        _, firsts = np.unique(index, return_index=True)  # (computed tokens,)
        ids, labels, positions, lasts = ids[firsts], labels[firsts], positions[firsts], index[lasts]
        shared["document_tokens"] = _on_device(index, device)
        shared["token_places"] = _on_device(firsts, device)
    return MicroBatch(
        ids=_on_device(ids[None], device),
        labels=_on_device(labels[None], device),
        attention_mask=None,
        rows=rows,
        trained_tokens=int(counts.sum()),
        real_tokens=tokens if rows else 0,
        document_labels=_on_device(counts, device),
        last_places=_on_device(lasts, device),
        places=places,
        boundaries=Boundaries(
            positions=_on_device(positions[None], device),
            ends=_on_device(ends.astype(np.int32), device),
            longest=int(lengths.max()),
            numbers=tuple(ends.tolist()),
            **shared,
        ),
    )


def _on_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy an array to a device; to a GPU asynchronously, from pinned memory."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
