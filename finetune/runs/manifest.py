"""Verify a checkpoint against its manifest: format, and size and hash of each file.

A manifest is untrusted input: its structure is checked, and file names that leave the folder are
refused.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from finetune.errors import FinetuneError, reading, refuse
from finetune.runs.run import Run

FORMAT = 2
"""Version of the layout that `finetune.checkpoints.checkpoint` writes."""

READ = (1, FORMAT)
"""Formats that can be resumed; format 1 has ranges of flattened parameters instead of boxes."""

STEP_FOLDER = re.compile(r"step-(\d{8})")

KEYS = {"format", "step", "progress", "backend", "processes", "shapes", "scalars", "files"}
"""Keys of every manifest. Newer ones also have `recipe`, and `sha256`, a hash of all other keys."""


class OtherFormat(FinetuneError):
    """A checkpoint has a format that this version does not read."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a hash of its contents under `sha256`."""
    text = json.dumps({key: manifest[key] for key in manifest if key != "sha256"}, sort_keys=True)
    return manifest | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _seal_problems(manifest: dict[str, Any]) -> list[str]:
    if "sha256" not in manifest:
        other = sorted((manifest.keys() ^ KEYS) - {"recipe"})
        return [f"damaged, unknown or missing: {', '.join(other)}"] if other else []
    whole = sealed(manifest)["sha256"] == manifest["sha256"]
    return [] if whole else ["damaged, its sha256 does not match its contents"]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        FinetuneError: the file cannot be read or is not a manifest, it has another format, or its
            step is not that of the folder's name.
    """
    path = folder / "manifest.json"
    with reading(f"{path}: cannot be read"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found is None:
        raise FinetuneError(f"{path}: no format: it is not a checkpoint's manifest")
    if found not in READ or isinstance(found, bool):
        raise OtherFormat(
            f"{path}: a checkpoint of format {found!r}, this version reads formats "
            f"{' and '.join(map(str, READ))}; "
            "continue it with the version of finetune in its environment.json, or start again in "
            "another --output"
        )
    wrong = _shape_problems(manifest) or _seal_problems(manifest)
    refuse(f"{path}: {problem}" for problem in wrong)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named is not None and int(named[1]) != manifest["step"]:
        raise FinetuneError(
            f"{path}: it is the checkpoint of step {manifest['step']}, in the folder of another"
        )
    return manifest


class _Entry(BaseModel):
    """A file of the checkpoint."""

    model_config = ConfigDict(strict=True)
    bytes: int
    sha256: str


class _Contents(BaseModel):
    """The part of a manifest that is read without further checks."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    progress: dict[str, Any]
    shapes: dict[str, list[NonNegativeInt]]
    scalars: dict[str, dict[str, int | float]]
    files: dict[str, _Entry]


def _shape_problems(manifest: dict[str, Any]) -> list[str]:
    """Deviations from the structure that `finetune.checkpoints.checkpoint` writes."""
    try:
        known = _Contents.model_validate(manifest)
    except ValidationError as error:
        return [
            f"{': '.join(map(str, each['loc']))}: {each['msg']}, got {each['input']!r}"
            for each in error.errors()
        ]
    problems = [
        f"files: {name!r} is outside the checkpoint's folder"
        for name in known.files
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
    ]
    if known.progress.get("step") != known.step:
        problems.append(f"step: got {known.step}, progress has {known.progress.get('step')}")
    return problems


def damage(folder: Path) -> list[str]:
    """Problems of a checkpoint, found by comparing every file with its hash; empty if intact.

    Raises:
        FinetuneError: the checkpoint has another format.
    """
    try:
        manifest = read_manifest(folder)
    except OtherFormat:
        raise
    except FinetuneError as error:
        return list(error.problems)
    return differing(folder, manifest["files"])


def differing(folder: Path, files: dict[str, Any]) -> list[str]:
    """Files of a manifest that are missing or damaged, one line per file."""
    problems: list[str] = []
    for name, known in files.items():
        path = folder / name
        if not os.path.isfile(path):
            problems.append(f"{path}: missing, though the manifest lists it")
        elif path.stat().st_size != known["bytes"]:
            size = path.stat().st_size
            problems.append(f"{path}: damaged, {size} bytes instead of {known['bytes']}")
        elif sha256(path) != known["sha256"]:
            problems.append(f"{path}: damaged, its sha256 does not match the manifest")
    return problems


def newest_intact(
    run: Run, foreign: Callable[[dict[str, Any]], list[str]] = lambda _: []
) -> tuple[int | None, dict[int, list[str]]]:
    """Step of the newest intact checkpoint, and the problems of newer ones by step.

    Args:
        run: the run whose checkpoints are verified.
        foreign: problems of a manifest that belongs to another run; they count as damage.

    Raises:
        FinetuneError: a checkpoint has another format, which does not count as damage.
    """
    damaged: dict[int, list[str]] = {}
    for step in reversed(run.steps()):
        folder = run.checkpoint(step)
        found = damage(folder) or foreign(read_manifest(folder))
        if not found:
            return step, damaged
        damaged[step] = found
    return None, damaged


def set_aside(run: Run, step: int) -> Path:
    """Rename a damaged checkpoint so that it is no longer used; returns the new folder."""
    folder = run.checkpoint(step)
    names = (f"damaged-{folder.name}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    return folder.rename(next(p for n in names if not (p := folder.with_name(n)).exists()))
