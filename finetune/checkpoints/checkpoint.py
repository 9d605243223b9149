"""Write and read checkpoints: one layout for every engine, written atomically, loadable elsewhere.

    step-00000010/
      adapter/     PEFT format                                       (recipes with an adapter)
      model/       transformers format, in the precision of the run  (recipes without)
      tokenizer/   with the chat template of the training, and the image processor if there is one
      state/       rank-00000-of-00002.safetensors, ...: the fp32 weights and the optimizer state,
                   as boxes of each rank's shards (`finetune.distributed.boxes`), and the model's
                   other tensors: persistent buffers and, without an adapter, frozen weights
      manifest.json   step, recipe, progress, the size and SHA-256 of every file and of itself;
                      written last

`adapter/` and `model/` contain a generation_config.json with the stop tokens of the training.

Files are written to a scratch folder that is renamed when it is complete. Shuffling and sampling
depend only on the seed and the step, so there is no state of a random generator to save.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune import catalog
from finetune.checkpoints.copies import insist, store_of_parts
from finetune.checkpoints.pretrained import (
    kept_tensors,
    persistent_buffers,
    write_adapter,
    write_model,
)
from finetune.checkpoints.staging import Staging
from finetune.checkpoints.stop_tokens import follow_umask
from finetune.data.images.processor import ImageProcessor
from finetune.distributed.base import Engine
from finetune.distributed.fragments import Fragment
from finetune.distributed.layers import trained_shapes
from finetune.distributed.parameters import assign, to_host
from finetune.distributed.reader import KEPT, OWN, Reader
from finetune.errors import FinetuneError, TrainingFailure, reading
from finetune.runs.manifest import FORMAT, read_manifest, sealed, sha256
from finetune.runs.run import Run, write_json

Group = torch.distributed.ProcessGroup


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a training at a checkpoint; the step also determines the position in the data."""

    step: int = 0
    """Optimizer steps taken."""
    best_loss: float | None = None
    """Lowest evaluation loss so far, or the metric of `evaluation.best`, negated if higher is
    better."""
    best_step: int | None = None
    stale: int = 0
    """Consecutive evaluations without improvement."""
    skipped: int = 0
    """Steps skipped because their loss or gradient was not finite."""
    data: dict[str, Any] | None = None
    """Identity of the rows that the steps refer to: see `finetune.data.audit.identity`."""
    base: str | None = None
    """Identity of the adapter's base: see `finetune.checkpoints.base_weights.fingerprint`."""
    plateau: dict[str, float] | None = None
    """State of the schedule `reduce_lr_on_plateau`: see `finetune.training.optim.plateau`."""
    scale: dict[str, float] | None = None
    """State of the fp16 loss scale: see `finetune.distributed.loss_scale`."""
    stream: dict[str, Any] | None = None
    """Where the next rows of a stream are: see `finetune.data.stream.windows`."""


@dataclasses.dataclass(frozen=True)
class State:
    """A rank's part of a checkpoint, copied to host memory."""

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, dict[str, float]]
    """Scalar optimizer state by parameter name, such as the step count."""
    shapes: dict[str, tuple[int, ...]]
    """Unsharded shape of every trained parameter."""


def take(engine: Engine, staging: Staging) -> State:
    """Copy this rank's state to host memory, which `staging` provides; collective."""
    staging.begin()
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    shapes = trained_shapes(engine.module)
    for fragment in engine.fragments():
        for key, values in fragment.values.items():
            shape = fragment.shape or shapes[fragment.name]
            own = OWN if fragment.shape is not None else ""
            for box, part in fragment.boxes(shape, staging.copy(values)):
                # Named by its place in the complete tensor: any number of ranks finds its part.
                tensors[f"{fragment.name}|{key}|{own}{','.join(map(str, box.offsets))}"] = part
        for key, values in fragment.whole.items():
            tensors[f"{fragment.name}|{key}|whole"] = staging.copy(values)
        scalars[fragment.name] = scalars.get(fragment.name, {}) | fragment.scalars
    for name, values in kept_tensors(engine):
        tensors[f"{name}|{KEPT}|whole"] = values
    staging.wait()
    return State(tensors, scalars, shapes)


def write(
    engine: Engine,
    run: Run,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
    state: State,
    images: ImageProcessor | None = None,
    group: Group | None = None,
) -> int:
    """Write a checkpoint from the states of all ranks; collective. Returns its size in bytes.

    Args:
        images: the image processor of the model, which is written with the tokenizer.
        group: process group for the collectives, if called from a background thread.

    Raises:
        TrainingFailure: on every rank, if any of them could not write (for example on a full
            disk). Earlier checkpoints are not touched.
    """
    folder, store = run.checkpoint(progress.step), store_of_parts(run)
    scratch = folder.with_name(f".{folder.name}.partial")
    parts = [scratch / "state" / _part(rank, engine.world) for rank in range(engine.world)]
    if engine.is_main:
        shutil.rmtree(scratch, ignore_errors=True)
    engine.gather(None, group)  # a barrier: no rank writes before the folder is removed
    mine = attempt(lambda: _write_fragments(parts[engine.rank], state.tensors))
    if store is not None and store.machine and mine is None:
        mine = attempt(lambda: insist(lambda: store.push_part(parts[engine.rank])))
    # Rank 0 goes on with the files of all ranks.
    _agree(engine, mine, folder, group)
    scalars = engine.gather(state.scalars, group)
    outcome: Any = None
    if engine.is_main:
        if store is not None:
            outcome = attempt(lambda: insist(lambda: store.fetch_parts(parts)))
        outcome = outcome or attempt(
            lambda: _complete(
                engine, scratch, folder, progress, tokenizer, images, scalars, state.shapes
            )
        )
    sizes = _agree(engine, outcome, folder, group)
    if store is not None and store.machine:
        parts[engine.rank].unlink()  # machine 0 has it, and the store
    return sizes[0]


def attempt(work: Any) -> Any:
    """The result of `work`, or its error as a string, so that all ranks reach the next collective.

    Catches every exception: tokenizers 0.23 raises a bare Exception on a full disk.
    """
    try:
        return work()
    except (OSError, SafetensorError, FinetuneError) as error:
        return f"error: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def _agree(engine: Engine, mine: Any, folder: Path, group: Group | None) -> list[Any]:
    """The outcomes of all ranks, on every rank; raises on all ranks if one failed."""
    outcomes = engine.gather(mine, group)
    causes = causes_of(outcomes)
    if not causes:
        return outcomes
    if engine.is_main:
        shutil.rmtree(folder.with_name(f".{folder.name}.partial"), ignore_errors=True)
    kept = Run(folder.parent.parent).newest()
    standing = f"step {kept} is the newest complete one" if kept else "there is no earlier one"
    raise TrainingFailure(f"{folder}: the checkpoint could not be written ({causes}); {standing}")


def causes_of(outcomes: list[Any]) -> str:
    """Errors among the results of every rank's `attempt`, joined; empty if there are none."""
    errors = {o for o in outcomes if isinstance(o, str) and o.startswith("error: ")}
    return "; ".join(error.removeprefix("error: ") for error in sorted(errors))


def _part(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _write_fragments(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    _flush(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _complete(
    engine: Engine,
    scratch: Path,
    folder: Path,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    scalars: list[dict[str, dict[str, float]]],
    shapes: dict[str, tuple[int, ...]],
) -> int:
    """On rank 0: write the adapter or model and the manifest, then rename. Returns bytes."""
    merged: dict[str, dict[str, float]] = {}
    for of_rank in scalars:
        for name, values in of_rank.items():
            merged[name] = merged.get(name, {}) | values
    tokenizer.save_pretrained(scratch / "tokenizer")
    if images is not None:
        images.save(scratch / "tokenizer")
    # Read back from the files just written: rank 0 needs no other rank for it, and one part of the
    # model in memory at a time.
    with Reader(scratch, shapes) as reader:
        if engine.plan.recipe.adapter is not None:
            write_adapter(engine, scratch / "adapter", reader, shapes)
        else:
            write_model(engine, scratch / "model", reader, shapes)
    follow_umask(scratch)
    # After everything else was written, since the manifest has the hash of every file.
    files = {
        str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(scratch.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "step": progress.step,
        "recipe": catalog.to_fields(engine.plan.recipe),
        "progress": dataclasses.asdict(progress),
        "backend": engine.plan.backend.name,
        "processes": engine.world,
        "shapes": shapes,
        "scalars": merged,
        "files": files,
    }
    write_json(scratch / "manifest.json", sealed(manifest))
    _flush(scratch / "manifest.json")
    # A step is saved again if an evaluation of it was made up after resuming.
    if folder.exists():
        shutil.rmtree(folder)
    scratch.rename(folder)
    return sum(entry["bytes"] for entry in files.values())


def progress_of(folder: Path) -> Progress:
    with reading(f"{folder}/manifest.json: progress"):
        return Progress(**read_manifest(folder)["progress"])


def load_weights(module: nn.Module, folder: Path) -> None:
    """Load a checkpoint's weights into a model before an engine shards it.

    Raises:
        FinetuneError: the trained parameters differ from the checkpoint's.
    """
    shapes = {name: tuple(shape) for name, shape in read_manifest(folder)["shapes"].items()}
    here = trained_shapes(module)
    differing = sorted(
        name for name in shapes.keys() | here.keys() if shapes.get(name) != here.get(name)
    )
    if differing:
        name = differing[0]
        raise FinetuneError(
            f"{folder}: {len(differing)} trained parameters differ from the recipe's, the first is "
            f"{name}: {shapes.get(name)} in the checkpoint, {here.get(name)} in the recipe"
        )
    with Reader(folder) as reader, torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                assign(parameter, reader.full(name, "weight").reshape(shapes[name]))
        kept = reader.kept()
        for name, buffer in persistent_buffers(module):
            if name in kept:
                buffer.copy_(kept[name])


def load_state(engine: Engine, folder: Path) -> None:
    """Load the fp32 weights, optimizer state and loss scale of a checkpoint into an engine."""
    scalars = read_manifest(folder)["scalars"]
    with Reader(folder) as reader, torch.no_grad():

        def extras(name: str) -> Fragment:
            # Only names: an engine reads its own part of each value.
            keys = {key: torch.empty(0) for key in reader.keys(name) if key != "weight"}
            return Fragment(name, 0, keys, reader.uncut.get(name, {}), scalars.get(name, {}))

        engine.restore(reader, extras)
    engine.scale.restore(progress_of(folder).scale)


def compare(engine: Engine, folder: Path) -> list[str]:
    """Names of trained parameters whose values in a checkpoint differ from this rank's shards."""
    differing: list[str] = []
    with Reader(folder) as reader:
        for fragment in engine.fragments():
            same = (
                torch.equal(reader.box(fragment.name, key, box), part)
                for key, values in fragment.values.items()
                for box, part in fragment.boxes(reader.shape(fragment.name, key), to_host(values))
            )
            if not all(same):
                differing.append(fragment.name)
    return differing
