"""Where a trained parameter lives on this rank: one contiguous range of its flattened elements.

Every engine cuts parameters into such ranges: whole on one process, a block of rows under FSDP, a
piece of a flat buffer under ZeRO. A checkpoint holds the ranges as they lie, so saving gathers
nothing, and any engine on any number of processes reads the ranges that it needs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.distributed.engine import Engine
from finetune.errors import FinetuneError

KEPT = "kept"
"""Key in `state/` of tensors that training does not update and that a result needs all the same."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW, the only update rule that the planner lets a sharded backend run."""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a flattened parameter, with their optimizer state.

    `values["weight"]` is the fp32 weight; the others are optimizer state by the optimizer's own
    names. Each is flat. `whole` holds state of another size and `scalars` plain numbers.
    """

    name: str
    start: int
    values: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)


Read = Callable[[str, str, int, int], torch.Tensor]
"""(name, key, start, numel) -> the flat elements from a checkpoint."""


def local(engine: Engine) -> Iterator[Fragment]:
    """The fragments that this rank writes; together the ranks write each element once."""
    stage = engine.plan.backend.shard
    if not engine.deepspeed:
        yield from _torch_fragments(engine)
    elif stage == "params":
        yield from _zero3_fragments(engine)
    else:
        yield from _zero12_fragments(engine)


def restore(engine: Engine, read: Read, extras: Callable[[str], Fragment]) -> None:
    """Fill this rank's fp32 weights and optimizer state from a checkpoint.

    `extras(name)` gives the state of a parameter that is not cut, and its scalars.
    """
    if not engine.deepspeed:
        _restore_torch(engine, read, extras)
    elif engine.plan.backend.shard == "params":
        _restore_zero3(engine, read, extras)
    else:
        _restore_zero12(engine, read, extras)


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

    def kept(self) -> dict[str, torch.Tensor]:
        """Tensors that training does not update, by name."""
        return {name: values[KEPT] for name, values in self.uncut.items() if KEPT in values}

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


# One process, DDP, FSDP2 -------------------------------------------------------------------------


def _states(engine: Engine) -> dict[int, dict[str, Any]]:
    """State of each parameter by its identity."""
    inners = [optimizer.optimizer for optimizer in engine.optimizers]
    return {id(p): state for inner in inners for p, state in inner.state.items()}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.detach().reshape(-1)


def _start(parameter: nn.Parameter) -> int:
    """Offset of this rank's rows in the flattened parameter: FSDP2 cuts the first dimension."""
    if not isinstance(parameter.data, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.data.device_mesh, parameter.data.placements
    )
    return offsets[0] * parameter.shape[1:].numel()


def _torch_fragments(engine: Engine) -> Iterator[Fragment]:
    states = _states(engine)
    for name, parameter in engine.trained():
        flat, start = _flat(parameter.data), _start(parameter)
        keep = slice(None)
        if engine.plan.backend.engine == "ddp":  # every rank has all of it: each writes a share
            share = -(-flat.numel() // engine.world)
            start = min(engine.rank * share, flat.numel())
            keep = slice(start, start + share)
        values = {"weight": flat[keep]}
        whole: dict[str, torch.Tensor] = {}
        scalars: dict[str, float] = {}
        for key, value in states.get(id(parameter), {}).items():
            if not isinstance(value, torch.Tensor):
                scalars[key] = value
            elif value.dim() == 0:
                scalars[key] = value.item()
            elif value.numel() == parameter.numel():
                values[key] = _flat(value)[keep]
            elif engine.rank == 0:
                whole[key] = value
        yield Fragment(name, start, values, whole, scalars)


def _restore_torch(engine: Engine, read: Read, extras: Callable[[str], Fragment]) -> None:
    owners = {
        id(p): o.optimizer for o in engine.optimizers for g in o.param_groups for p in g["params"]
    }
    for name, parameter in engine.trained():
        extra = extras(name)
        flat, start = _flat(parameter.data), _start(parameter)
        flat.copy_(read(name, "weight", start, flat.numel()))
        if not (extra.values or extra.whole or extra.scalars):
            continue  # saved before the optimizer's first step
        state: dict[str, Any] = dict(extra.whole)
        for key in extra.values:
            values = read(name, key, start, flat.numel())
            state[key] = torch.empty_like(parameter.data, dtype=values.dtype)
            _flat(state[key]).copy_(values)
        for key, number in extra.scalars.items():
            # torch keeps counters as fp32 tensors (on the device when fused), bitsandbytes as ints.
            is_torch = isinstance(number, float)
            state[key] = torch.tensor(number, device=flat.device) if is_torch else number
        owners[id(parameter)].state[parameter] = {
            key: value.to(flat.device) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }


# DeepSpeed ZeRO-1 and ZeRO-2: pieces of one flat fp32 partition per parameter group --------------


def _base_optimizer(engine: Engine) -> torch.optim.Optimizer:
    return engine.model.optimizer.optimizer


def _partition(engine: Engine, parameter: nn.Parameter) -> torch.Tensor:
    """The flat fp32 partition that holds this rank's piece of a parameter."""
    group = parameter._hp_mapping.param_group_index
    return _base_optimizer(engine).param_groups[group]["params"][0]


def _zero12_fragments(engine: Engine) -> Iterator[Fragment]:
    base = _base_optimizer(engine)
    for name, parameter in engine.trained():
        mapping = parameter._hp_mapping
        if mapping is None:  # no piece of it on this rank
            continue
        state = base.state.get(_partition(engine, parameter), {})
        place = mapping.get_hp_fragment_address()
        values = {"weight": mapping.get_hp_fragment().detach()}
        values |= {
            key: state[key].narrow(0, place.start, place.numel) for key in MOMENTS if key in state
        }
        scalars = {"step": float(state["step"])} if "step" in state else {}
        yield Fragment(name, mapping.lp_fragment_address.start, values, scalars=scalars)


def _restore_zero12(engine: Engine, read: Read, extras: Callable[[str], Fragment]) -> None:
    base = _base_optimizer(engine)
    for name, parameter in engine.trained():
        mapping = parameter._hp_mapping
        if mapping is None:
            continue
        partition, place = _partition(engine, parameter), mapping.get_hp_fragment_address()
        start = mapping.lp_fragment_address.start
        mapping.get_hp_fragment().data.copy_(read(name, "weight", start, place.numel))
        extra = extras(name)
        if not extra.scalars:
            continue
        if partition not in base.state:
            base.state[partition] = _fresh_state(partition, extra.scalars["step"])
        for key in MOMENTS:
            target = base.state[partition][key].narrow(0, place.start, place.numel)
            target.copy_(read(name, key, start, place.numel))


def _fresh_state(partition: torch.Tensor, step: float) -> dict[str, torch.Tensor]:
    state = {key: torch.zeros_like(partition.data) for key in MOMENTS}
    return state | {"step": torch.tensor(step, device=partition.device)}


# DeepSpeed ZeRO-3: a slice of each parameter, padded on the last rank ----------------------------


def _zero3_slices(engine: Engine) -> Iterator[tuple[str, nn.Parameter, int, int]]:
    """Name, parameter, first element and number of elements (without padding) on this rank."""
    for name, parameter in engine.trained():
        size = parameter.ds_tensor.ds_numel
        start = engine.rank * size
        yield name, parameter, start, max(0, min(size, parameter.ds_numel - start))


def _zero3_step(engine: Engine) -> float | None:
    """The optimizer's own count of steps, None before the first."""
    for state in _base_optimizer(engine).state.values():
        if "step" in state:
            return float(state["step"])
    return None


def _zero3_fragments(engine: Engine) -> Iterator[Fragment]:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    step = _zero3_step(engine)
    for name, parameter, start, size in _zero3_slices(engine):
        values = {"weight": safe_get_local_fp32_param(parameter).detach()[:size].clone()}
        if step is not None:
            for key in MOMENTS:
                state = safe_get_local_optimizer_state(parameter, key)
                values[key] = state.detach()[:size].clone()
        yield Fragment(name, start, values, scalars={} if step is None else {"step": step})


def _restore_zero3(engine: Engine, read: Read, extras: Callable[[str], Fragment]) -> None:
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    slices = list(_zero3_slices(engine))
    steps = extras(slices[0][0]).scalars
    if steps:
        _fresh_zero3_state(engine, steps["step"])
    for name, parameter, start, size in slices:
        padding = parameter.ds_tensor.ds_numel - size

        def partition(key: str, place=(name, start, size, padding)) -> torch.Tensor:
            name, start, size, padding = place
            values = read(name, key, start, size) if size else torch.zeros(0)
            return nn.functional.pad(values, (0, padding)).to(engine.device)

        safe_set_local_fp32_param(parameter, partition("weight"))
        for key in MOMENTS if steps else ():
            safe_set_local_optimizer_state(parameter, partition(key), key)


def _fresh_zero3_state(engine: Engine, step: float) -> None:
    """Give every fp32 partition the state that the optimizer would make at its first step."""
    zero = engine.model.optimizer
    for index, partition in enumerate(zero.fp32_partitioned_groups_flat):
        on_disk = zero._swappable_optimizer_subgroup(index)
        if on_disk:
            zero._optimizer_states_and_gradient_swap_in(index)
        zero.optimizer.state[partition] = _fresh_state(partition, step)
        if on_disk:
            zero._optimizer_states_and_gradient_swap_out(index)
