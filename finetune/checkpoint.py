"""Checkpoints: one layout for every engine, whole or invisible, and usable by themselves.

    step-00000010/
      adapter/     PEFT format                                       (recipes with an adapter)
      model/       transformers format, in the precision of the run  (recipes without)
      tokenizer/   with the chat template of the training
      state/       rank-00000-of-00002.safetensors, ...: the fp32 weights and the optimizer state,
                   as the fragments that each rank held (`finetune.fragments`)
      manifest.json   step, progress, the size and SHA-256 of every file and of itself; written last

Files are written into a scratch folder that is renamed when it is complete. What is drawn at random
or shuffled depends on the seed and the step alone, so no generator has a state to save.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.engine import Engine
from finetune.errors import FinetuneError, TrainingFailure
from finetune.fragments import Fragment, local, restore
from finetune.integrity import FORMAT, read_manifest, sealed, sha256
from finetune.run import Run, write_json

SHARD_BYTES = 4 * 1024**3

Group = torch.distributed.ProcessGroup


@dataclasses.dataclass(frozen=True)
class Progress:
    """What training is due after a checkpoint; the step is the state of the data."""

    step: int = 0
    """Optimizer steps taken."""
    best_loss: float | None = None
    """Lowest evaluation loss so far."""
    best_step: int | None = None
    stale: int = 0
    """Evaluations in a row that were not better."""
    skipped: int = 0
    """Steps that were not taken, because their gradient was not finite."""
    data: dict[str, Any] | None = None
    """The rows that the steps count in: see `finetune.data.audit.identity`."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a rank writes of a checkpoint, copied out of the training."""

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, dict[str, float]]
    """Of its parameters by name."""
    shapes: dict[str, tuple[int, ...]]
    """Of every trained parameter, whole."""


def save(engine: Engine, run: Run, progress: Progress, tokenizer: PreTrainedTokenizerBase) -> int:
    """Write the checkpoint of a step, on every rank together; returns its size in bytes.

    Raises:
        TrainingFailure: see `write`.
    """
    return write(engine, run, progress, tokenizer, take(engine))


def take(engine: Engine) -> State:
    """A copy of this rank's state in host memory, on every rank together."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    for fragment in local(engine):
        for key, values in fragment.values.items():
            if values.numel():
                tensors[f"{fragment.name}|{key}|{fragment.start}"] = _to_host(values)
        for key, values in fragment.whole.items():
            tensors[f"{fragment.name}|{key}|whole"] = _to_host(values)
        scalars[fragment.name] = fragment.scalars
    shapes = {name: tuple(whole_shape(p)) for name, p in engine.trained()}
    return State(tensors, scalars, shapes)


def write(
    engine: Engine,
    run: Run,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
    state: State,
    group: Group | None = None,
) -> int:
    """Write a checkpoint from what each rank has taken; returns its size in bytes.

    `group` is the one through which the ranks agree, for a thread beside the training.

    Raises:
        TrainingFailure: on every rank, when any of them could not write (a full disk, say). The
            checkpoints before it are untouched.
    """
    folder = run.checkpoint(progress.step)
    scratch = folder.with_name(f".{folder.name}.partial")
    if engine.speaks:
        shutil.rmtree(scratch, ignore_errors=True)
    gather(engine, None, group)  # nobody writes before that is done
    mine = attempt(lambda: _write_fragments(engine, scratch / "state", state.tensors))
    _agree(engine, mine, folder, group)
    scalars = gather(engine, state.scalars, group)
    outcome: Any = None
    if engine.speaks:
        outcome = attempt(
            lambda: _complete(engine, scratch, folder, progress, tokenizer, scalars, state.shapes)
        )
    sizes = _agree(engine, outcome, folder, group)
    return sizes[0]


def attempt(work: Any) -> Any:
    """The result of some writing, or the error as a string: a rank must not leave the others.

    Any error: of a full disk, tokenizers 0.23 raises a bare Exception.
    """
    try:
        return work()
    except (OSError, SafetensorError, FinetuneError) as error:
        return f"error: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def _agree(engine: Engine, mine: Any, folder: Path, group: Group | None) -> list[Any]:
    """Everybody's outcome on every rank; raises on all of them when one failed."""
    outcomes = gather(engine, mine, group)
    causes = causes_of(outcomes)
    if not causes:
        return outcomes
    if engine.speaks:
        shutil.rmtree(folder.with_name(f".{folder.name}.partial"), ignore_errors=True)
    kept = Run(folder.parent.parent).newest()
    standing = f"step {kept} is the newest complete one" if kept else "there is none before it"
    raise TrainingFailure(f"{folder}: the checkpoint could not be written ({causes}); {standing}")


def causes_of(outcomes: list[Any]) -> str:
    """The errors among what every rank's `attempt` gave; empty where there is none."""
    errors = {o for o in outcomes if isinstance(o, str) and o.startswith("error: ")}
    return "; ".join(error.removeprefix("error: ") for error in sorted(errors))


def gather(engine: Engine, mine: Any, group: Group | None = None) -> list[Any]:
    """What every rank has, on every rank."""
    if engine.world == 1:
        return [mine]
    outcomes: list[Any] = [None] * engine.world
    torch.distributed.all_gather_object(outcomes, mine, group=group)
    return outcomes


def _write_fragments(engine: Engine, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{engine.rank:05d}-of-{engine.world:05d}.safetensors"
    save_file(tensors, path)
    _flush(path)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True).contiguous()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _complete(
    engine: Engine,
    scratch: Path,
    folder: Path,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
    scalars: list[dict[str, dict[str, float]]],
    shapes: dict[str, tuple[int, ...]],
) -> int:
    """On one rank: what is usable by itself, the manifest, and the rename. Returns bytes."""
    merged: dict[str, dict[str, float]] = {}
    for of_rank in scalars:
        for name, values in of_rank.items():
            merged[name] = merged.get(name, {}) | values
    tokenizer.save_pretrained(scratch / "tokenizer")
    with Reader(scratch) as reader:
        if engine.plan.recipe.adapter is not None:
            _write_adapter(engine.module, scratch / "adapter", reader, shapes)
        else:
            _write_model(engine, scratch / "model", reader, shapes)
    files = {
        str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(scratch.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "step": progress.step,
        "progress": dataclasses.asdict(progress),
        "backend": engine.plan.backend.name,
        "processes": engine.world,
        "shapes": shapes,
        "scalars": merged,
        "files": files,
    }
    write_json(scratch / "manifest.json", sealed(manifest))
    _flush(scratch / "manifest.json")
    if folder.exists():
        shutil.rmtree(folder)
    scratch.rename(folder)
    return sum(entry["bytes"] for entry in files.values())


def _write_adapter(
    module: nn.Module, folder: Path, reader: "Reader", shapes: dict[str, tuple[int, ...]]
) -> None:
    folder.mkdir()
    tensors = {
        key: reader.whole(name, "weight").reshape(shapes[name])
        for key, name in adapter_keys(module, list(shapes)).items()
    }
    empty = [key for key, tensor in tensors.items() if not tensor.numel()]
    if empty or not tensors:
        raise TrainingFailure(f"{folder}: refused to write an empty adapter ({empty[:3]})")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    module.peft_config["default"].save_pretrained(folder)


def adapter_keys(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Key in PEFT's file -> trained parameter, by letting PEFT rename numbered tags.

    A parameter of two names, as of tied tables that are trained whole, has two keys.
    """
    tags = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    parameters = dict(module.named_parameters())
    numbers = {id(parameters[name]): tag for name, tag in tags.items() if name in parameters}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in numbers:
            tags.setdefault(name, numbers[id(parameter)])
    renamed = get_peft_model_state_dict(module, state_dict=dict(tags), save_embedding_layers=False)
    return {key: names[int(tag.item())] for key, tag in renamed.items()}


def _write_model(
    engine: Engine, folder: Path, reader: "Reader", shapes: dict[str, tuple[int, ...]]
) -> None:
    """The whole model in transformers' sharded format, a part at a time."""
    folder.mkdir()
    dtype = torch.bfloat16 if engine.plan.backend.precision == "bf16" else torch.float32
    parts: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        bytes_of = torch.Size(shape).numel() * dtype.itemsize
        if parts[-1] and size + bytes_of > SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_of
    index: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        one = len(parts) == 1
        file = "model.safetensors" if one else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {n: reader.whole(n, "weight").reshape(shapes[n]).to(dtype) for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(parts) > 1:
        total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        metadata = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", metadata)
    module = engine.module
    module.config.save_pretrained(folder)
    if module.generation_config is not None:
        module.generation_config.save_pretrained(folder)


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", None) or parameter.shape  # ds_shape: ZeRO-3 only


class Reader:
    """Reads ranges of parameters from the fragments of a checkpoint, whoever wrote them."""

    def __init__(self, folder: Path) -> None:
        self.files = [
            safe_open(path, framework="pt")
            for path in sorted((folder / "state").glob("*.safetensors"))
        ]
        self.places: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}
        self.uncut: dict[str, dict[str, torch.Tensor]] = {}
        for file in self.files:
            for label in file.keys():  # noqa: SIM118 (not a dict)
                name, key, start = label.rsplit("|", 2)
                if start == "whole":
                    self.uncut.setdefault(name, {})[key] = file.get_tensor(label)
                    continue
                numel = file.get_slice(label).get_shape()[0]
                self.places.setdefault((name, key), []).append((int(start), numel, file, label))
        for places in self.places.values():
            places.sort(key=lambda place: place[0])

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()
        self.places.clear()

    def keys(self, name: str) -> list[str]:
        return [key for known, key in self.places if known == name]

    def range(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Flat elements [start, start + numel) of a parameter's value.

        Raises:
            FinetuneError: the checkpoint does not hold all of them.
        """
        pieces: list[torch.Tensor] = []
        reached = start
        for first, size, file, label in self.places.get((name, key), []):
            begin, end = max(reached, first), min(start + numel, first + size)
            if begin == reached and begin < end:
                pieces.append(file.get_slice(label)[begin - first : end - first])
                reached = end
        if reached != start + numel:
            raise FinetuneError(
                f"the checkpoint holds no elements {reached} to {start + numel} of {name} ({key}): "
                "it is of another model or adapter, or a rank's file is missing"
            )
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def whole(self, name: str, key: str) -> torch.Tensor:
        last = self.places.get((name, key), [(0, 0, None, "")])[-1]
        return self.range(name, key, 0, last[0] + last[1])


def progress_of(folder: Path) -> Progress:
    try:
        return Progress(**read_manifest(folder)["progress"])
    except TypeError as error:
        raise FinetuneError(f"{folder}/manifest.json: progress: {error}") from None


def load_weights(module: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights into a model before an engine shards it.

    Raises:
        FinetuneError: its parameters are not those of the checkpoint.
    """
    shapes = {name: tuple(shape) for name, shape in read_manifest(folder)["shapes"].items()}
    here = {n: tuple(whole_shape(p)) for n, p in module.named_parameters() if p.requires_grad}
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
                assign(parameter, reader.whole(name, "weight").reshape(shapes[name]))


def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if getattr(parameter, "ds_id", None) is None:  # set by deepspeed.zero.Init only
        parameter.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.copy_(value)


def load_state(engine: Engine, folder: Path) -> None:
    """Give a prepared engine the fp32 weights and optimizer state of a checkpoint."""
    scalars = read_manifest(folder)["scalars"]
    with Reader(folder) as reader, torch.no_grad():

        def extras(name: str) -> Fragment:
            keys = {key: torch.empty(0) for key in reader.keys(name) if key != "weight"}
            return Fragment(name, 0, keys, reader.uncut.get(name, {}), scalars.get(name, {}))

        restore(engine, reader.range, extras)


def compare(engine: Engine, folder: Path) -> list[str]:
    """Trained parameters whose checkpoint differs from what this rank holds of them."""
    differing: list[str] = []
    with Reader(folder) as reader:
        for fragment in local(engine):
            same = (
                torch.equal(reader.range(fragment.name, key, fragment.start, values.numel()),
                            _to_host(values))
                for key, values in fragment.values.items()
            )  # fmt: skip
            if not all(same):
                differing.append(fragment.name)
    return differing
