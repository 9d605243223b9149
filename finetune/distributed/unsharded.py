"""Engines for one process and for DistributedDataParallel, with unsharded weights and state."""

import contextlib
import dataclasses
import datetime
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import nn

from finetune.distributed.base import Engine
from finetune.distributed.device import on_cpu
from finetune.distributed.fragments import Fragment, scalar_state
from finetune.distributed.parameters import local, row_state
from finetune.distributed.reader import Reader


class Native(Engine):
    """Engine of one process, and the base of all engines that use torch's optimizers directly."""

    kinds = frozenset({DistributedType.NO})

    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        return {"cpu": on_cpu(), "kwargs_handlers": [InitProcessGroupKwargs(timeout=timeout)]}

    def first_row(self, parameter: nn.Parameter) -> int:
        """Row of the unsharded parameter at which this rank's part begins."""
        return 0

    def copies(self) -> tuple[int, int]:
        """Number of ranks that hold the same part, and this rank's index; each writes a share."""
        return 1, 0

    def written(
        self, name: str, parameter: nn.Parameter, values: dict[str, torch.Tensor]
    ) -> Fragment:
        """What this rank writes of values of one shape, which are cut as the parameter is.

        Their shape is that of the parameter, or another one with as many rows.
        """
        shape = next(iter(values.values())).shape
        flat = {key: local(value).detach().reshape(-1) for key, value in values.items()}
        copies, mine = self.copies()
        numel = next(iter(flat.values())).numel()
        share = -(-numel // copies)
        begin = min(mine * share, numel)
        start = self.first_row(parameter) * math.prod(shape[1:]) + begin
        kept = {key: value[begin : begin + share] for key, value in flat.items()}
        return Fragment(name, start, kept, shape=None if shape == parameter.shape else tuple(shape))

    def part(
        self, reader: Reader, name: str, key: str, parameter: nn.Parameter, made: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of a value in a checkpoint, which is cut as `made` is."""
        start = self.first_row(parameter) * math.prod(made.shape[1:])
        return reader.range(name, key, start, local(made).numel()).view(local(made).shape)

    def fragments(self) -> Iterator[Fragment]:
        states = self._states()
        numbers = scalar_values(states.values())
        for name, parameter in self.trained():
            values = {"weight": parameter.data}
            whole: dict[str, torch.Tensor] = {}
            scalars: dict[str, float] = {}
            for key, value in states.get(id(parameter), {}).items():
                if not isinstance(value, torch.Tensor):
                    scalars[key] = value
                elif value.dim() == 0:
                    scalars[key] = numbers[id(value)]
                elif value.shape == parameter.shape:
                    values[key] = value
                elif value.shape[0] == parameter.shape[0]:
                    yield self.written(name, parameter, {key: value})
                elif self.writes_unsharded:
                    whole[key] = value
            written = self.written(name, parameter, values)
            yield dataclasses.replace(written, whole=whole, scalars=scalars)

    def restore(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        owners = self.owners()
        for name, parameter in self.trained():
            extra, data = extras(name), parameter.data
            local(data).copy_(self.part(reader, name, "weight", parameter, data))
            if not (extra.values or extra.whole or extra.scalars):
                continue  # saved before the optimizer's first step
            state: dict[str, Any] = {key: each.to(data.device) for key, each in extra.whole.items()}
            for key in extra.values:
                shape = reader.shape(name, key)
                # With the placements of the parameter: the optimizer updates both together.
                made = data if shape == data.shape else row_state(parameter, *shape[1:])
                values = self.part(reader, name, key, parameter, made)
                state[key] = torch.empty_like(made, dtype=values.dtype)
                local(state[key]).copy_(values)
            state |= scalar_state(extra.scalars, data.device)
            owners[id(parameter)].state[parameter] = state

    def _states(self) -> dict[int, dict[str, Any]]:
        """Optimizer state of each parameter, by `id`."""
        inners = [optimizer.optimizer for optimizer in self.optimizers]  # type: ignore[attr-defined]
        return {id(p): state for inner in inners for p, state in inner.state.items()}


class Ddp(Native):
    """Engine in which every rank has the complete model; gradients are averaged once per step."""

    kinds = frozenset({DistributedType.MULTI_GPU, DistributedType.MULTI_CPU})

    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        given = super().plugin(nvme_path, timeout)
        # Buffers are equal on every rank; broadcasting them would cost a collective per step.
        # Gradients that are views of the buckets are not stored twice.
        wrapped = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True
        )
        return given | {"kwargs_handlers": [*given["kwargs_handlers"], wrapped]}

    @property
    def module(self) -> nn.Module:
        return self.model.module

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def copies(self) -> tuple[int, int]:
        return self.world, self.rank

    def close(self) -> None:
        """Delete DDP's reducer before the process group.

        If it holds the last reference to a gloo group, torch 2.13 joins the group's thread while
        holding the GIL, and that thread may wait for the GIL.
        """
        self.model, self.optimizers = nn.Module(), []
        self.accelerator.free_memory()
        gc.collect()
        super().close()


def scalar_values(states: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Values of the scalar tensors among optimizer states by `id`, in one transfer per device."""
    scalars = [
        value
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    ]
    kinds = {(each.device, each.dtype) for each in scalars}
    return {
        id(each): number
        for kind in kinds
        if (alike := [each for each in scalars if (each.device, each.dtype) == kind])
        for each, number in zip(alike, torch.stack(alike).tolist(), strict=True)
    }
