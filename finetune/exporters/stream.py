"""Write safetensors files tensor by tensor, with only one of them in memory."""

import dataclasses
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from accelerate.utils import convert_file_size_to_int

from finetune.errors import FinetuneError
from finetune.runs import units
from finetune.runs.run import write_json

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of data types in the safetensors format."""

SPARE = 64 * 2**20
"""Bytes of free disk space required in addition to the weights, for other files of an export."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A weight file, whose header is known before its tensors."""

    name: str
    header: bytes
    places: dict[str, int]
    """Offset of each tensor in bytes from the start of the file."""
    size: int


class Weights:
    """The weight files of a model, named as by `save_pretrained` and written tensor by tensor."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], shard_size: str) -> None:
        """Assign an offset in a file to each tensor.

        Args:
            folder: Folder of the files.
            tensors: All tensors, on the meta device.
            shard_size: Maximum size of a file, such as 5GB; a larger tensor has its own file.

        Raises:
            FinetuneError: the disk has too little free space, or `shard_size` is not a size.
        """
        self.folder = folder
        self.shards = list(_shards(tensors, bytes_of(shard_size)))
        self.total = sum(tensor.nbytes for tensor in tensors.values())
        self.left = {name: shard for shard in self.shards for name in shard.places}
        self.wanted = dict(tensors)
        free = shutil.disk_usage(folder).free
        if free < self.total + SPARE:
            raise FinetuneError(
                f"{folder.parent}: the disk has {units.size(free)} free, but the weights need "
                f"{units.size(self.total)}; name a folder on another disk"
            )
        self._files: dict[str, BinaryIO] = {}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            wanted, shard = self.wanted[name], self.left.pop(name)
            assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), name
            file = self._open(shard)
            file.seek(shard.places[name])
            numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            if len(numbers):
                file.write(memoryview(numbers))
            if shard not in self.left.values():
                self._files.pop(shard.name).close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def finish(self) -> None:
        """Write the index if there are several files; call it after all tensors are written."""
        assert not self.left, f"not written: {sorted(self.left)[:3]}"
        if len(self.shards) > 1:
            index = {name: shard.name for shard in self.shards for name in shard.places}
            metadata = {"metadata": {"total_size": self.total}, "weight_map": index}
            write_json(self.folder / "model.safetensors.index.json", metadata)

    def _open(self, shard: Shard) -> BinaryIO:
        if shard.name not in self._files:
            file = (self.folder / shard.name).open("wb")
            file.write(shard.header)
            file.truncate(shard.size)
            self._files[shard.name] = file
        return self._files[shard.name]


def bytes_of(shard_size: str) -> int:
    """Bytes of a size such as 5GB.

    Raises:
        FinetuneError: it is not a positive size.
    """
    try:
        found = int(convert_file_size_to_int(shard_size))
    except ValueError:
        found = 0
    if found < 1:
        raise FinetuneError(f"--shard-size: got '{shard_size}', expected a size such as 5GB")
    return found


def _shards(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[Shard]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    for number, part in enumerate(parts, start=1):
        many = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        yield _shard("model.safetensors" if len(parts) == 1 else many, part)


def _shard(name: str, tensors: Mapping[str, torch.Tensor]) -> Shard:
    """Order tensors as safetensors does, the widest data types first, so that each is aligned."""
    order = sorted(tensors, key=lambda each: (-tensors[each].element_size(), each))
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for each in order:
        tensor = tensors[each]
        offsets[each], end = end, end + tensor.nbytes
        fields[each] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[each], end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    places = {each: len(header) + offset for each, offset in offsets.items()}
    return Shard(name, header, places, len(header) + end)
