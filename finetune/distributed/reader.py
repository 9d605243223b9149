"""Read parameters from the shards of a checkpoint, whichever engine wrote them.

Files of format 1 contain flat ranges (`name|key|first element`), files of format 2 contain boxes in
their own shape (`name|key|offset,offset`), or boxes of a value that has another shape than the
parameter (`name|key|of offset,offset`). torch's distributed checkpoint is not used, because it
cannot represent DeepSpeed's flat partitions, has no hashes of its files, and stores tensors in a
format that other libraries do not read.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.distributed.boxes import Box, boxes_of
from finetune.errors import FinetuneError
from finetune.runs.manifest import read_manifest

KEPT = "kept"
"""Key in `state/` of tensors that training does not update but that a result needs."""

OWN = "of "
"""Begins the place of a box in a value that has not the shape of its parameter."""

Shapes = dict[str, tuple[int, ...]]
"""Unsharded shape of every trained parameter, by name."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A box, and its location in a file."""

    box: Box
    file: Any
    label: str
    start: int | None
    """First element in a flat range of format 1; None for a box in its own shape."""

    def read(self, part: Box) -> torch.Tensor:
        """Read a part of the box, in the shape of the part."""
        view = self.file.get_slice(self.label)
        if self.start is not None:
            flat = view[self.start : self.start + self.box.numel]
            return flat.reshape(self.box.sizes)[part.within(self.box.offsets)]
        if not self.box.sizes:
            return self.file.get_tensor(self.label)
        return view[part.within(self.box.offsets)]


class Reader:
    """Reads ranges of parameters from the boxes of a checkpoint."""

    def __init__(self, folder: Path, shapes: Shapes | None = None) -> None:
        """Open the files of a checkpoint.

        Args:
            folder: Folder of the checkpoint.
            shapes: Shapes of its parameters; by default those in its manifest.

        Raises:
            FinetuneError: the manifest cannot be read.
        """
        if shapes is None:
            listed = read_manifest(folder)["shapes"]
            shapes = {name: tuple(shape) for name, shape in listed.items()}
        self.shapes = shapes
        self.files = [
            safe_open(path, framework="pt")
            for path in sorted((folder / "state").glob("*.safetensors"))
        ]
        self.pieces: dict[tuple[str, str], list[_Piece]] = {}
        self.uncut: dict[str, dict[str, torch.Tensor]] = {}
        self.own: set[tuple[str, str]] = set()
        """Values whose boxes are not those of the parameter, but of the value itself."""
        for file in self.files:
            for label in file.keys():  # noqa: SIM118 (not a dict)
                name, key, place = label.rsplit("|", 2)
                if place == "whole":
                    self.uncut.setdefault(name, {})[key] = file.get_tensor(label)
                elif name in shapes:
                    sizes = tuple(file.get_slice(label).get_shape())
                    if place.startswith(OWN):
                        self.own.add((name, key))
                    found = _pieces(file, label, place, sizes, shapes[name])
                    self.pieces.setdefault((name, key), []).extend(found)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()
        self.pieces.clear()

    def kept(self) -> dict[str, torch.Tensor]:
        """Tensors that training does not update, by name."""
        return {name: values[KEPT] for name, values in self.uncut.items() if KEPT in values}

    def keys(self, name: str) -> list[str]:
        return [key for known, key in self.pieces if known == name]

    def shape(self, name: str, key: str) -> tuple[int, ...]:
        """Unsharded shape of a value."""
        if (name, key) not in self.own:
            return self.shapes.get(name, ())
        boxes = [piece.box for piece in self.pieces[name, key]]
        ends = ([sum(each) for each in zip(box.offsets, box.sizes, strict=True)] for box in boxes)
        return tuple(map(max, zip(*ends, strict=True)))

    def range(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Flat elements [start, start + numel) of a parameter's value.

        Raises:
            FinetuneError: the checkpoint lacks some of them, or has some of them twice.
        """
        parts: list[torch.Tensor] = []
        reached = start
        for box in boxes_of(self.shape(name, key), start, numel):
            values, seen = self._box(name, key, box)
            if not bool(seen.all()):
                reached += int(seen.reshape(-1).int().argmin())
                raise _lacking(f"elements {reached} to {start + numel}", name, key)
            parts.append(values.reshape(-1))
            reached += box.numel
        return torch.cat(parts) if parts else torch.zeros(0)

    def box(self, name: str, key: str, box: Box) -> torch.Tensor:
        """A block of a parameter's value, in its own shape.

        Raises:
            FinetuneError: as for `range`.
        """
        values, seen = self._box(name, key, box)
        if not bool(seen.all()):
            raise _lacking(f"complete block {box.sizes} at {box.offsets}", name, key)
        return values if box.numel else torch.zeros(box.sizes)

    def full(self, name: str, key: str) -> torch.Tensor:
        """All elements of a parameter's value, flat."""
        return self.range(name, key, 0, math.prod(self.shapes.get(name, ())))

    def _box(self, name: str, key: str, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """The values of a box, and a mask of those that the checkpoint contains."""
        values, seen = torch.zeros(0), torch.zeros(box.sizes, dtype=torch.bool)
        for piece in self.pieces.get((name, key), []):
            part = box.shared(piece.box)
            if part is None:
                continue
            read, place = piece.read(part), part.within(box.offsets)
            if not values.numel():
                values = torch.zeros(box.sizes, dtype=read.dtype)
            if bool(seen[place].any()):
                raise FinetuneError(
                    f"the checkpoint holds elements of {name} ({key}) twice: a file of another "
                    "checkpoint is in its state/"
                )
            values[place], seen[place] = read, True
        return values, seen


def _lacking(what: str, name: str, key: str) -> FinetuneError:
    return FinetuneError(
        f"the checkpoint holds no {what} of {name} ({key}): it belongs to another model or "
        "adapter, or a rank's file is missing"
    )


def _pieces(
    file: Any, label: str, place: str, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> list[_Piece]:
    """The boxes in one tensor of a file."""
    own = place.startswith(OWN)
    offsets = tuple(int(each) for each in place.removeprefix(OWN).split(",") if each)
    if own or len(offsets) == len(shape) == len(sizes):
        return [_Piece(Box(offsets, sizes), file, label, None)]
    found: list[_Piece] = []
    reached = 0
    for box in boxes_of(shape, offsets[0], math.prod(sizes)):
        found.append(_Piece(box, file, label, reached))
        reached += box.numel
    return found
