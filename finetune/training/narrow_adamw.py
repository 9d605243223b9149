"""AdamW whose moments are stored in 8 or 4 bits, the same on every backend that cuts at rows.

A moment is stored as codes of a map of 256 or 16 values, and one fp32 scale per block, the largest
absolute value in it (arXiv:2110.02861, section 2; 4 bits: arXiv:2309.01507, section 3). A block is
a part of a row, and what is stored so depends on the complete tensor alone. So the result does not
depend on the number of processes, bit for bit, which the blocks of bitsandbytes and torchao do.
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.distributed.parameters import local, local_gradient, row_state
from finetune.errors import FinetuneError
from finetune.training.schedule_free import AdamW

SMALLEST = 4096
"""Elements of the smallest tensor that is stored in codes, as in bitsandbytes."""
NARROWEST = 16
"""Elements of the smallest block: with a smaller one, scales would weigh as much as codes."""
CHUNKS = {"cpu": 2**18, "cuda": 2**21}
"""Elements updated at once: copies that fit the cache of a CPU, or are small next to a model."""
TINY = 1e-30
"""Smallest divisor, for blocks of zeros."""

Map = tuple[bool, int]
"""Whether the values of a map have a sign, and how many powers of ten it has: `table_of`."""


class Table(NamedTuple):
    """A map on a device, and what finds the code of a number by the upper half of its bits.

    Numbers in [-1, 1] with the same upper half lie closer together than middles of values do, so at
    most one middle is among them: a code is that of the smallest of them, plus 1 above the middle.
    """

    values: torch.Tensor
    """The sorted values, 256 or 16."""
    codes: torch.Tensor
    """The code of the smallest number with each upper half, (65536,); negative halves first."""
    middles: torch.Tensor
    """The next middle above that number, (65536,)."""

    def encode(self, shares: torch.Tensor) -> torch.Tensor:
        """Codes of the nearest values of fp32 numbers in [-1, 1]; a middle has the lower one."""
        half = (shares.view(torch.int32) >> 16).add_(2**15).flatten()
        above = shares.flatten() > self.middles.index_select(0, half)
        return self.codes.index_select(0, half).add_(above).view(shares.shape)


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits, both in the dynamic map of arXiv:1511.04561."""

    bits: ClassVar[int] = 8
    block: ClassVar[int] = 256
    """Elements of the largest block."""
    maps: ClassVar[dict[str, Map]] = {"exp_avg": (True, 7), "exp_avg_sq": (False, 7)}

    @functools.cached_property
    def tables(self) -> dict[torch.device, dict[str, Table]]:
        return {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._fresh(parameter))
        state["step"] += 1
        width, device = self.width(parameter) or 1, parameter.device
        if device not in self.tables:
            self.tables[device] = {key: table_of(*kind, device) for key, kind in self.maps.items()}
        tables = self.tables[device]
        weights = local(parameter.data).view(-1, width)
        gradient = local_gradient(parameter).reshape(-1, width)
        rows = max(1, CHUNKS.get(device.type, CHUNKS["cuda"]) // width)
        for start in range(0, len(weights), rows):
            part = slice(start, start + rows)
            moments = [_Moment(state, key, table, width, part) for key, table in tables.items()]
            _adamw(weights[part], gradient[part].float(), moments, state["step"], group)

    def take_over(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Replace a state in codes of bitsandbytes, which earlier versions saved, by our own.

        Its blocks are 256 elements of the flat tensor, so it is read where the tensor is complete.

        Raises:
            FinetuneError: the tensor is sharded.
        """
        if "state1" not in state:
            return
        if isinstance(parameter.data, DTensor):
            raise FinetuneError(
                "optim.name: the checkpoint holds moments in the blocks of bitsandbytes, which are "
                "read where tensors are complete; resume on one process or ddp"
            )
        found, width = self._fresh(parameter), self.width(parameter) or 1
        for number, (key, kind) in enumerate(self.maps.items(), 1):
            values = state[f"state{number}"].flatten()
            if values.dtype == torch.uint8:
                scale = state[f"absmax{number}"].repeat_interleave(256)[: len(values)]
                values = state[f"qmap{number}"][values.int()] * scale
            moment = _Moment(found, key, table_of(*kind, values.device), width, slice(None))
            if moment.scale is None:
                moment.stored.copy_(values.view(-1, width))
            moment.write(values.view(-1, width))
        found["step"] = int(state["step"])
        state.clear()
        state.update(found)

    def width(self, parameter: nn.Parameter) -> int:
        """Elements of a block of a parameter: a power of two; 0 if its moments are in fp32.

        Raises:
            FinetuneError: tensor parallelism cuts the parameter inside of a block.
        """
        row = math.prod(parameter.shape[1:])
        width = math.gcd(row, self.block)
        if parameter.dim() < 2 or parameter.numel() < SMALLEST or width < NARROWEST:
            return 0
        part = local(parameter.data).shape
        if math.prod(part[1:]) % width or part[2:] != parameter.shape[2:]:
            raise FinetuneError(
                f"optim.name: moments in {self.bits} bits have blocks of {width} elements of a "
                f"row, and tensor parallelism cuts {tuple(parameter.shape)} into "
                f"{tuple(part)}, inside of a block; use adamw, or fewer processes for it"
            )
        return width

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Moments of zero, which all codes are with a scale of zero."""
        state: dict[str, Any] = {"step": 0}
        row, width = math.prod(parameter.shape[1:]), self.width(parameter)
        for key in self.maps:
            if not width:
                state[key] = torch.zeros_like(parameter.data, dtype=torch.float32)
                continue
            state[key] = row_state(parameter, row * self.bits // 8, dtype=torch.uint8)
            state[f"{key}_scale"] = row_state(parameter, row // width)
        return state


class AdamW4bit(AdamW8bit):
    """AdamW with moments in 4 bits: the first in a dynamic map, the second in a linear one.

    The linear map has no zero, whose root would divide by `eps` (arXiv:2309.01507, section 4.1).
    """

    bits = 4
    block = 128
    maps: ClassVar[dict[str, Map]] = {"exp_avg": (True, 3), "exp_avg_sq": (False, 0)}


class _Moment:
    """Some blocks of a moment, which are read in fp32 and written back, both (blocks, width)."""

    def __init__(
        self, state: dict[str, Any], key: str, table: Table, width: int, part: slice
    ) -> None:
        stored, scale = local(state[key]), state.get(f"{key}_scale")
        self.scale = None if scale is None else local(scale).view(-1, 1)[part]
        self.table = table
        self.packed = scale is not None and len(table.values) == 16
        self.stored = stored.view(-1, width // 2 if self.packed else width)[part]

    def read(self) -> torch.Tensor:
        if self.scale is None:
            return self.stored
        codes = self.stored
        if self.packed:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        values = self.table.values.index_select(0, codes.flatten().int())
        return values.view(codes.shape).mul_(self.scale)

    def write(self, moment: torch.Tensor) -> None:
        if self.scale is None:
            return  # read() gave the stored values themselves
        torch.amax(moment.abs(), dim=1, keepdim=True, out=self.scale)
        codes = self.table.encode(moment / self.scale.clamp_min(TINY))
        self.stored.copy_(codes[:, ::2] | codes[:, 1::2] << 4 if self.packed else codes)


def _adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[_Moment],
    step: int,
    group: dict[str, Any],
) -> None:
    """A step of AdamW (arXiv:1711.05101) on some blocks, with the moments before they are stored.

    The operations are those of torch's AdamW, in their order.
    """
    lr, (b1, b2) = group["lr"], group["betas"]
    first, second = (moment.read() for moment in moments)
    first.lerp_(gradient, 1 - b1)
    second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    root = second.sqrt().div_(math.sqrt(1 - b2**step)).add_(group["eps"])
    new = weights.float().mul(1 - lr * group["weight_decay"])
    weights.copy_(new.addcdiv_(first, root, value=-lr / (1 - b1**step)))
    for moment, values in zip(moments, (first, second), strict=True):
        moment.write(values)


def table_of(signed: bool, exponents: int, device: torch.device) -> Table:
    """A map of sorted values in [-1, 1].

    The dynamic map (arXiv:1511.04561) has for each power of ten from 10^(1 - exponents) to 1 twice
    as many values as for the one below, which are the middles of equal parts of (0.1, 1), and 0
    and 1. Without exponents, the map is linear: 1/16, 2/16, ..., 1. A second moment is rounded to 0
    only in a block of zeros: its root would make a step of the size of 1 / `eps`.
    """
    if exponents == 0:
        values = torch.linspace(0, 1, 17)[1:]
    else:
        found = [torch.tensor([0.0, 1.0])]
        for power in range(exponents):
            parts = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
            middles = 10.0 ** (power + 1 - exponents) * (parts[:-1] + parts[1:]) / 2
            found += [middles, -middles] if signed else [middles]
        values = torch.cat(found).sort().values
    middles = (values[1:] + values[:-1]) / 2
    if not signed and exponents:
        middles[0] = -1
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    smallest = torch.where(half < 0, half | 0xFFFF, half).view(torch.float32).nan_to_num()
    codes = torch.bucketize(smallest, middles)
    middles = torch.cat((middles, torch.tensor([torch.inf])))[codes]
    return Table(values.to(device), codes.byte().to(device), middles.to(device))
