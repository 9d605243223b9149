"""Identify the base model of a run by hashing samples of its weight files."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.shapes.config_files import config_paths
from finetune.planner.shapes.prequantised import stored_kind
from finetune.recipe import Model
from finetune.runs.manifest import read_manifest

WHOLE = 16 * 2**20
"""Bytes; files up to this size are hashed completely."""
SAMPLE = 4096
"""Bytes hashed of each tensor, or of each position in a large pickle."""
PLACES = 1024
"""Positions sampled in a large pickle, whose tensors are not known."""
UNREADABLE = (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError)
"""Errors of a header or an index of another form, which the library that loads it reports."""
NAMES = ("model.safetensors", "pytorch_model.bin")
"""Weight files in the order in which transformers looks for them; each may also be sharded."""


def fingerprint(model: Model) -> str | None:
    """Hash of the base's weights: name, size and header of each file, a sample of each tensor.

    Returns:
        None for weights from scratch, or if no file of the model is on this machine.

    Raises:
        FinetuneError: a file cannot be read.
    """
    if model.name is None:
        return None
    folders = (config.parent for config in config_paths(model.name, model.revision))
    found = next(filter(None, map(weight_files, folders)), None)
    return None if found is None else _hash_of_files(found)


def refuse_other_base(checkpoint: Path, model: Model) -> None:
    """Refuse a base that differs from the one that a checkpoint's adapter was trained on.

    Older checkpoints do not record their base and are not checked.

    Raises:
        FinetuneError: the weights are different ones.
    """
    then, now = read_manifest(checkpoint)["progress"].get("base"), fingerprint(model)
    if None not in (then, now) and then != now:
        raise FinetuneError(
            f"{checkpoint}: it was trained on different frozen weights than {model.name} has "
            f"now ({then} then, {now} now): restore the old weights, or start another run"
        )


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers loads from a folder, also those that are missing."""
    for name in NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [folder / part for part in sorted(parts)]
            except UNREADABLE:
                return []  # transformers will report the problem
    return []


def refuse_codes(field: str, model: str, revision: str | None = None) -> None:
    """Refuse a model whose weights are codes that its `config.json` does not mention.

    Raises:
        FinetuneError: with the field, the model, and the first of these tensors.
    """
    problem = codes_read_as_weights(model, revision)
    if problem is not None:
        raise FinetuneError(f"{field}: {model}: {problem}")


def codes_read_as_weights(model: str, revision: str | None = None) -> str | None:
    """The problem of weights stored as codes, if `config.json` does not say so; otherwise None.

    transformers 5.23 converts integers and 8-bit floats to the type of the model without their
    scales, and without a warning. Pickles are not read.

    Args:
        model: Folder or hub id; a model that is not on this machine has no problem.
        revision: Revision of a hub id.
    """
    folders = [path.parent for path in config_paths(model, revision) if path.is_file()]
    if not folders or _is_declared(folders[0] / "config.json"):
        return None
    codes = codes_in(weight_files(folders[0]))
    if codes is None:
        return None
    return (
        f"{codes}, and config.json has no quantization_config, so that its codes would be read as "
        "weights; use the model that it was made from, or copy the config.json that was saved with "
        "these files"
    )


def codes_in(files: list[Path]) -> str | None:
    """The first tensor in files that is stored as codes, and their number; None if none is."""
    found = sorted(
        (name, str(each["dtype"]))
        for path in files
        for name, each in tensor_headers(path).items()
        if _is_code(name, str(each["dtype"]), len(each["shape"]))
    )
    if not found:
        return None
    more = f" (and {len(found) - 1} more like it)" if found[1:] else ""
    return f"the tensor {found[0][0]} is stored as {found[0][1]}{more}"


def _is_declared(config: Path) -> bool:
    """Whether a `config.json` says how weights are quantized; also if it cannot be read."""
    try:
        return stored_kind(json.loads(config.read_text(encoding="utf-8"))) is not None
    except UNREADABLE:
        return True  # transformers will report the problem


def tensor_headers(path: Path) -> dict[str, dict[str, Any]]:
    """`dtype`, `shape` and `data_offsets` of each tensor in a safetensors file.

    Empty for a pickle, and for a file that cannot be read, which the library that loads it reports.
    """
    if path.suffix != ".safetensors":
        return {}
    try:
        read = json.loads(_header(path)[1])
        return {name: each for name, each in read.items() if {"dtype", "shape"} <= each.keys()}
    except UNREADABLE:
        return {}


def _header(path: Path) -> tuple[int, bytes]:
    """Length in bytes that a safetensors file states for its header, and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, file.read(min(length, os.fstat(file.fileno()).st_size))


def _is_code(name: str, dtype: str, axes: int) -> bool:
    """Whether a tensor is part of a quantized weight, and not a table of indices or a mask."""
    last = name.rpartition(".")[2]
    if dtype.startswith(("F8", "F4", "F6")):
        return True
    if dtype in ("I8", "U8", "I16", "U16"):
        return "mask" not in last and (last != "bias" or axes == 1)
    return dtype in ("BOOL", "I32", "U32", "I64", "U64") and last.endswith(("weight", "_proj"))


def _hash_of_files(files: list[Path]) -> str:
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
    """Offset and length in bytes of each sample of a file, in order."""
    if size <= WHOLE:
        yield 0, size
        return
    if path.suffix != ".safetensors":
        yield from ((size * place // PLACES, SAMPLE) for place in range(PLACES))
        return
    header, text = _header(path)
    yield 0, 8 + header
    try:
        places = [each["data_offsets"] for each in json.loads(text).values() if "dtype" in each]
    except UNREADABLE:
        return  # safetensors will report the problem
    for first, last in sorted(places):
        yield 8 + header + max(first, (first + last - SAMPLE) // 2), min(SAMPLE, last - first)
