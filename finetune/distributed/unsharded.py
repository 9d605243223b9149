"""Engines for one process and for DistributedDataParallel, with unsharded weights and state."""

import contextlib
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

    def first_element(self, parameter: nn.Parameter) -> int:
        """Offset of this rank's part in the flattened parameter."""
        return 0

    def copies(self) -> tuple[int, int]:
        """Number of ranks that hold the same part, and this rank's index; each writes a share."""
        return 1, 0

    def fragments(self) -> Iterator[Fragment]:
        states = self._states()
        numbers = scalar_values(states.values())
        for name, parameter in self.trained():
            flat = _flat(parameter.data)
            keep = self._share(flat)
            values = {"weight": flat[keep]}
            whole: dict[str, torch.Tensor] = {}
            scalars: dict[str, float] = {}
            for key, value in states.get(id(parameter), {}).items():
                if not isinstance(value, torch.Tensor):
                    scalars[key] = value
                elif value.dim() == 0:
                    scalars[key] = numbers[id(value)]
                elif value.shape == parameter.shape:
                    values[key] = _flat(value)[keep]
                elif value.shape[0] == parameter.shape[0]:
                    yield self._of_rows(name, key, value, parameter)
                elif self.rank == 0:
                    whole[key] = value
            start = self.first_element(parameter) + keep.start
            yield Fragment(name, start, values, whole, scalars)

    def _share(self, flat: torch.Tensor) -> slice:
        """The elements that this rank writes of those that some ranks hold alike."""
        copies, mine = self.copies()
        share = -(-flat.numel() // copies)
        begin = min(mine * share, flat.numel())
        return slice(begin, begin + share)

    def _of_rows(
        self, name: str, key: str, value: torch.Tensor, parameter: nn.Parameter
    ) -> Fragment:
        """State of each row, which is cut with the rows of the parameter."""
        shape, flat = tuple(value.shape), _flat(value)
        keep = self._share(flat)
        start = self._first_row(parameter) * math.prod(shape[1:]) + keep.start
        return Fragment(name, start, {key: flat[keep]}, shape=shape)

    def _first_row(self, parameter: nn.Parameter) -> int:
        return self.first_element(parameter) // max(1, math.prod(parameter.shape[1:]))

    def restore(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        owners = self.owners()
        for name, parameter in self.trained():
            extra = extras(name)
            flat, start = _flat(parameter.data), self.first_element(parameter)
            flat.copy_(reader.range(name, "weight", start, flat.numel()))
            if not (extra.values or extra.whole or extra.scalars):
                continue  # saved before the optimizer's first step
            state: dict[str, Any] = dict(extra.whole)
            for key in extra.values:
                shape, begin, made = reader.shape(name, key), start, parameter.data
                if shape != parameter.shape:
                    made = row_state(parameter, *shape[1:])
                    begin = self._first_row(parameter) * math.prod(shape[1:])
                values = reader.range(name, key, begin, local(made).numel())
                state[key] = torch.empty_like(made, dtype=values.dtype)
                _flat(state[key]).copy_(values)
            state |= scalar_state(extra.scalars, flat.device)
            owners[id(parameter)].state[parameter] = {
                key: value.to(flat.device) if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }

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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).detach().reshape(-1)
