"""Which base a run trains on: its weight files, told apart by samples and not read whole."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.planner.shapes.config_files import config_paths
from finetune.recipe import Model
from finetune.runs.manifest import read_manifest

WHOLE = 16 * 2**20
"""A file of at most so many bytes is hashed whole."""
SAMPLE = 4096
"""Bytes of each tensor, or place, that are hashed of a larger one."""
PLACES = 1024
"""Places of a large pickle, whose tensors are not known."""
NAMES = ("model.safetensors", "pytorch_model.bin")
"""What transformers looks for, the first that is there; each also as parts with an index."""


def fingerprint(model: Model) -> str | None:
    """A hash of the base's weights: name, size and header of each file, a sample of each tensor.

    Returns:
        None for weights from scratch, and where no file of the model is on this machine.

    Raises:
        FinetuneError: a file cannot be read.
    """
    if model.name is None:
        return None
    folders = (config.parent for config in config_paths(model.name, model.revision))
    found = next(filter(None, map(_files, folders)), None)
    return None if found is None else _of_files(found)


def refuse_other_base(checkpoint: Path, model: Model) -> None:
    """Refuse a base that is not the one that a checkpoint's adapter was trained on.

    A checkpoint that was written before the base was kept in it says nothing of it.

    Raises:
        FinetuneError: it is another one.
    """
    then, now = read_manifest(checkpoint)["progress"].get("base"), fingerprint(model)
    if None not in (then, now) and then != now:
        raise FinetuneError(
            f"{checkpoint}: its adapter was trained on other weights than those of {model.name} "
            f"now ({then} then, {now} now): put the old ones back, or train another run on these"
        )


def _files(folder: Path) -> list[Path]:
    """The weight files that transformers loads from a folder."""
    for name in NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [folder / part for part in sorted(parts)]
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                return []  # transformers says what is wrong with it
    return []


def _of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\0".encode())
                for start, length in _samples(path, size):
                    file.seek(start)
                    digest.update(file.read(length))
        except OSError as error:
            raise FinetuneError(f"{path}: {error.strerror}") from None
    return digest.hexdigest()[:12]


def _samples(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Places of a file and their lengths in bytes, in order."""
    if size <= WHOLE:
        yield 0, size
        return
    if path.suffix != ".safetensors":
        yield from ((size * place // PLACES, SAMPLE) for place in range(PLACES))
        return
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        text = file.read(min(header, size))
    yield 0, 8 + header
    try:
        places = [each["data_offsets"] for each in json.loads(text).values() if "dtype" in each]
    except (ValueError, KeyError, AttributeError, TypeError):
        return  # the reader of safetensors says what is wrong with it
    for first, last in sorted(places):
        yield 8 + header + max(first, (first + last - SAMPLE) // 2), min(SAMPLE, last - first)
