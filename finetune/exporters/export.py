"""Export a trained run to a folder for other libraries; the folder is written atomically."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from finetune import extensions
from finetune.checkpoints.stop_tokens import follow_umask, saved_tokenizer
from finetune.data.images.processor import copy_processor
from finetune.data.scratch import scratch_for
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters import CHECKS, EXPORTERS, vllm
from finetune.exporters.check import CHECK_ROWS, check, check_lines
from finetune.exporters.source import Source, is_loadable, open_source
from finetune.exporters.stream import bytes_of
from finetune.inference.generate import turn_end
from finetune.inference.load import ADAPTER_WEIGHTS, Step, tensor_shapes, trained_dtype
from finetune.reports.card import Kind, write_card
from finetune.runs.run import Run, open_run, write_json

Exporter = Callable[[Source, Path], Kind]
"""Writes a checkpoint into an empty folder, and returns the kind of its contents.

Tokenizer, card and file modes are written afterwards.
"""

Gate = Callable[[int], None]
"""Called with the step of a checkpoint before it is exported; raises to prevent the export."""

MergeInto = Literal["nf4"]

GENERATING = ("vllm", "nf4", "gguf", "ollama")
"""Formats for models that generate text."""
MARKER = "export.json"
"""Lists the files of an export: a folder with any other file is never replaced."""


def export(
    run: Run | str | Path,
    to: str | Path,
    merge: bool = False,
    step: Step | None = None,
    dtype: torch.dtype | None = None,
    shard_size: str = "5GB",
    *,
    format: str | None = None,
    check_rows: int = CHECK_ROWS,
    merge_into: MergeInto | None = None,
    llama_cpp: str | Path | None = None,
    gguf_type: str = "q8_0",
    base: str | None = None,
    gate: Gate | None = None,
) -> Path:
    """Export a run in a format that other libraries load, with its tokenizer and card.

    Args:
        to: New or empty folder, or the folder of an earlier export, which is replaced.
        merge: Same as `format="merged"` for a run with an adapter.
        step: Step of the checkpoint; by default the best one, else the last.
        dtype: Data type of merged or full weights; by default that of the base model's files.
        shard_size: Maximum size of a weight file.
        format: Name in `finetune.exporters.EXPORTERS`, or `module:function` of an `Exporter`;
            by default `adapter`, or `model` if all weights were trained.
        check_rows: Number of the run's rows on which the export is compared with the trained model.
        merge_into: `nf4` merges into the base as it was quantized for training.
        llama_cpp: Checkout of llama.cpp, for `gguf` and `ollama`.
        gguf_type: Data type of a GGUF file, such as q8_0 or q4_k_m.
        base: Name of the adapter's base in the exported files; by default as in the run.
        gate: Called with the step after all other checks, before anything is written; an exception
            stops the export.

    Raises:
        FinetuneError: a damaged checkpoint, an incomplete adapter, an unknown format, a model that
            the format does not support, or a folder that is not an earlier export.
        TrainingFailure: writing failed, or the export differs from the trained model; no files are
            left.
    """
    run = run if isinstance(run, Run) else open_run(run)
    bytes_of(shard_size)
    to = Path(to)
    to = to if to.name not in ("", "..") else to.resolve()
    _refuse_foreign(to)
    source = dataclasses.replace(
        open_source(run, step, dtype, shard_size),
        llama_cpp=None if llama_cpp is None else Path(llama_cpp),
        gguf_type=gguf_type.lower(),
        merge_into=merge_into,
        base=base,
    )
    name = format or _default_format(source, merge or merge_into is not None)
    if merge_into is not None and (source.adapter is None or name in ("adapter", "vllm")):
        raise FinetuneError(
            f"--merge-into: --format {name} does not merge an adapter; remove this flag"
        )
    if merge_into is not None and source.recipe.model.quantization != merge_into:
        raise FinetuneError(
            f"--merge-into {merge_into}: the run trained on a base with quantization="
            f"{source.recipe.model.quantization}; remove this flag"
        )
    if source.generation is None and name in GENERATING:
        raise FinetuneError(
            f"--format {name}: this format is for models that generate text, and this one outputs "
            f"scores; use {_default_format(source, merge)}"
        )
    write: Exporter = extensions.find("--format", name, EXPORTERS)
    if name in CHECKS:
        extensions.find("--format", name, CHECKS)(source)
    if gate is not None:
        gate(source.step)
    with _replacing(to) as folder:
        kind = write(source, folder)
        if kind != "gguf":
            end = turn_end(source.tokenizer)
            saved_tokenizer(source.tokenizer, end).save_pretrained(folder)
            copy_processor(source.checkpoint / "tokenizer", folder)
        checked = check(source, folder, kind, check_rows) if check_rows else "not requested"
        commands = serve_commands(source, folder, kind)
        lines = check_lines(checked)
        write_card(run, folder, kind=kind, step=source.step, serve=commands, checked=lines)
        follow_umask(folder)
        files = sorted(path.name for path in folder.iterdir())
        trained = trained_dtype(run)
        about = {
            "run": run.root.resolve().name,
            "checkpoint": source.checkpoint.name,
            "kind": name,
            "trained_dtype": None if trained is None else str(trained).removeprefix("torch."),
            "serve": commands,
            "check": checked if isinstance(checked, str) else dataclasses.asdict(checked),
        }
        write_json(folder / MARKER, {**about, "files": [*files, MARKER]})
    return to


def serve_commands(source: Source, folder: Path, kind: Kind) -> list[str]:
    """Shell commands to run in the folder of an export; none for a model that generates no text."""
    if kind == "gguf":
        (weights,) = folder.glob("*.gguf")
        made = ["ollama create tuned -f Modelfile"] if (folder / "Modelfile").is_file() else []
        return [*made, f"llama-server -m {weights.name} --jinja"]
    if source.generation is None or not is_loadable(folder):
        return []
    own, dtype = "finetune serve .", trained_dtype(source.run)
    if kind == "nf4":
        return [own, "vllm serve ."]
    if kind != "adapter":
        return [own, " ".join(["vllm serve .", *vllm.dtype_words(dtype)])]
    config = vllm.read_config(folder)
    if vllm.problems(config, tensor_shapes(folder / ADAPTER_WEIGHTS)):
        return [own]
    base, _ = source.base_name
    named = "BASE" if Path(base).is_absolute() else base
    return [own, vllm.command(folder, named, config, dtype)]


def _default_format(source: Source, merge: bool) -> str:
    if source.adapter is None:
        return "model"
    return "merged" if merge else "adapter"


def _refuse_foreign(to: Path) -> None:
    """Reject a target that is neither an empty folder nor an earlier export without other files."""
    if not to.exists() and not to.is_symlink():
        return
    if not to.is_dir() or to.is_symlink():
        raise FinetuneError(f"{to}: exists and is not a folder; name another one")
    there = {path.name for path in to.iterdir()}
    marker = to / MARKER
    ours = _listed(marker)
    if there - ours:
        some = ", ".join(sorted(there - ours)[:3])
        raise FinetuneError(
            f"{to}: holds files not written by an export ({some}); "
            "name another folder, or move them"
        )


def _listed(marker: Path) -> set[str]:
    """Names of the files that an export wrote; none if the marker is missing or invalid."""
    try:
        return set(map(str, json.loads(marker.read_text(encoding="utf-8"))["files"]))
    except (FileNotFoundError, ValueError, TypeError, LookupError, RecursionError):
        return set()


@contextlib.contextmanager
def _replacing(to: Path) -> Iterator[Path]:
    """A temporary folder next to `to`, renamed to `to` after all files are synced to disk."""
    scratch = to
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with scratch_for(to) as scratch:
            new, old = scratch / "new", scratch / "old"
            new.mkdir()
            yield new
            for path in [*new.iterdir(), new]:
                _sync(path)
            if to.exists():
                to.rename(old)
            try:
                new.rename(to)
            finally:
                if old.exists() and not to.exists():
                    old.rename(to)
    except (OSError, SafetensorError) as error:
        named = error.filename if isinstance(error, OSError) else None
        if named is not None and to != scratch and not Path(named).is_relative_to(scratch):
            raise FinetuneError(f"{named}: {error.strerror}") from None
        raise TrainingFailure(
            f"{to}: could not be written: {error}; partial files were removed"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
