"""Muon, each matrix complete on one process, whichever engine holds its parts.

The momentum is sharded like the parameter. In a round, each process of a group gets the parts of
one matrix, orthogonalizes it, and sends the parts back; matrices of similar size share a round. So
a step is that of one process, and the work is divided:

    parts of matrices 0, 1     rank 0: a0 b0   rank 1: a1 b1
    exchanged                  rank 0: a0 a1   rank 1: b0 b1
    orthogonalized, returned   rank 0: a0 b0   rank 1: a1 b1
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.distributed.boxes import Box
from finetune.distributed.device import on_cpu
from finetune.distributed.parameters import local, local_gradient

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Iterations, and the polynomial of each (https://kellerjordan.github.io/posts/muon)."""


class Part(NamedTuple):
    """A process's part of a matrix, or of a stack of them."""

    parameter: nn.Parameter
    shape: torch.Size
    """Of the complete matrix."""
    group: dist.ProcessGroup | None = None
    """Processes that hold its parts, or copies of it; None if this one needs no other."""
    counts: tuple[int, ...] = ()
    """Elements on each of these processes, in their order; none if each has a copy."""
    begin: int | None = None
    """Where the part begins in a parameter that is flat, and holds parts of several matrices."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that is cut as the parameter is."""
        if self.begin is None or self.group is None:
            return local(tensor)
        return tensor[self.begin : self.begin + self.counts[self.group.rank()]]


def parts_of_flat(
    flat: nn.Parameter, shape: torch.Size, start: int, size: int, begin: int = 0
) -> Iterator[Part]:
    """The matrices of a tensor whose elements are cut after every `size` ones, wherever that is.

    Args:
        flat: This process's elements, of this tensor and of others.
        shape: Of the tensor, which may be a stack of matrices.
        start: Its first element, counted from the first one of process 0.
        size: Elements of each process.
        begin: Where these elements begin in `flat`.
    """
    group = dist.group.WORLD
    assert group is not None
    elements = shape[-2:].numel()
    for first in range(start, start + shape.numel(), elements):
        cuts = [min(max(size * rank - first, 0), elements) for rank in range(group.size() + 1)]
        counts = tuple(after - before for before, after in itertools.pairwise(cuts))
        yield Part(flat, shape[-2:], group, counts, begin + max(first - size * group.rank(), 0))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for matrices and stacks of matrices, such as experts.

    Updates have the RMS of AdamW's (arXiv:2502.16982, section 2.2), so that one learning rate fits
    both. The operations are those of `torch.optim.Muon` in torch 2.13, in their order.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        """Use `dtype` for the iterations; `copies` are processes with equal unsharded tensors."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype, self.copies = dtype, copies
        self.flat: dict[int, list[Part]] = {}
        """Parts of matrices in each flat parameter, by its `id`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for round_ in _rounds(part for each in trained for part in self._parts(each)):
                updates = [self._momentum(each, group["momentum"]) for each in round_]
                for part, update in zip(round_, _orthogonal(round_, updates), strict=True):
                    weights = part.of(part.parameter.data)
                    weights.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = 0.2 * math.sqrt(max(part.shape[-2:]))
                    weights.add_(update.to(weights.device), alpha=-group["lr"] * scale)

    def _parts(self, parameter: nn.Parameter) -> list[Part]:
        """The parts of matrices that a parameter holds.

        Stacks need no exchange, because their first dimension is the one that is sharded.
        """
        if id(parameter) in self.flat:
            return self.flat[id(parameter)]
        data, shape = parameter.data, parameter.shape
        if parameter.dim() == 3 or _cut_otherwise(parameter):
            return [Part(parameter, shape)]
        if not isinstance(data, DTensor):
            return [Part(parameter, shape, self.copies)]
        (axis,) = [index for index, each in enumerate(data.placements) if each.is_shard()]
        group = data.device_mesh.get_group(axis)
        if group.size() == 1:
            return [Part(parameter, shape)]
        size = -(-shape[0] // group.size())  # rows of a part; the last parts have fewer
        rows = [max(0, min(size, shape[0] - rank * size)) for rank in range(group.size())]
        return [Part(parameter, shape, group, tuple(count * shape[1] for count in rows))]

    def _momentum(self, part: Part, momentum: float) -> torch.Tensor:
        """Update the momentum; this process's part of the update, in the type of the iterations."""
        state = self.state[part.parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(part.parameter.data)
        moment = part.of(state["momentum_buffer"])
        gradient = part.of(local_gradient(part.parameter))
        moment.lerp_(gradient, 1 - momentum)
        return gradient.lerp(moment, momentum).to(self.dtype)


class Joined(torch.optim.Optimizer):
    """Several optimizers as one, with their groups, for an engine that takes one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.of_each = [(each, each.param_groups) for each in optimizers]
        for each in optimizers:
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the groups that are there: ZeRO-1 and 2 step one at a time."""
        asked = {id(group) for group in self.param_groups}
        for each, groups in self.of_each:
            each.param_groups = [group for group in groups if id(group) in asked]
            each.step()


def _rounds(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Matrices that are orthogonalized at the same time, one on each process of their group."""
    alike: dict[dist.ProcessGroup | None, list[Part]] = {}
    for part in parts:
        alike.setdefault(part.group, []).append(part)
    for group, found in alike.items():
        found.sort(key=lambda each: -each.shape.numel() * min(each.shape))
        count = 1 if group is None else group.size()
        for start in range(0, len(found), count):
            yield found[start : start + count]


def _orthogonal(parts: list[Part], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of the orthogonalized updates of a round."""
    group = parts[0].group
    if group is None:
        return [
            _of_complete(part.parameter, update)
            if _cut_otherwise(part.parameter)
            else orthogonalized(update)
            for part, update in zip(parts, updates, strict=True)
        ]
    mine = group.rank()
    if not parts[0].counts:
        if mine < len(updates):
            updates[mine] = orthogonalized(updates[mine]).contiguous()
        for rank, update in enumerate(updates):
            dist.broadcast(update, group=group, group_src=rank)
        return updates
    data, usual = parts[0].parameter.data, "cpu" if on_cpu() else "cuda"
    device = data.device_mesh.device_type if isinstance(data, DTensor) else usual
    sent = torch.cat([each.flatten() for each in updates]).to(device)
    sizes = [each.numel() for each in updates] + [0] * (group.size() - len(updates))
    from_all = list(parts[mine].counts) if mine < len(parts) else [0] * group.size()
    matrix = sent.new_empty(sum(from_all))
    dist.all_to_all_single(matrix, sent, from_all, sizes, group=group)
    if len(matrix):
        matrix = orthogonalized(matrix.view(parts[mine].shape)).flatten()
    dist.all_to_all_single(sent, matrix, sizes, from_all, group=group)
    back = zip(sent.split(sizes), updates, strict=False)
    return [values.view(update.shape) for values, update in back]


def _cut_otherwise(parameter: nn.Parameter) -> bool:
    """Whether a parameter is cut, but not along one axis of processes into rows or matrices."""
    data = parameter.data
    cut = [e for e in data.placements if not e.is_replicate()] if isinstance(data, DTensor) else []
    return any(not each.is_shard(0) for each in cut) or (parameter.dim() == 2 and len(cut) > 1)


def _of_complete(parameter: nn.Parameter, update: torch.Tensor) -> torch.Tensor:
    """This process's part of an orthogonalized update, of which every process has all."""
    data: Any = parameter.data
    given = {"run_check": False, "shape": data.shape, "stride": data.stride()}
    update = update.to(data.device_mesh.device_type)
    whole = DTensor.from_local(update, data.device_mesh, data.placements, **given).full_tensor()
    sizes, offsets = compute_local_shape_and_global_offset(
        data.shape, data.device_mesh, data.placements
    )
    return orthogonalized(whole)[Box(tuple(offsets), tuple(sizes)).within((0,) * data.dim())]


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix to a matrix, or to each of a stack, by Newton-Schulz.

    As in Muon, singular values end between about 0.7 and 1.2 instead of at 1.
    """
    if matrices.dim() == 3:
        return (
            torch.stack([orthogonalized(each) for each in matrices]) if len(matrices) else matrices
        )
    a, b, c = COEFFICIENTS
    tall = matrices.size(0) > matrices.size(1)
    found = matrices.T if tall else matrices
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        square = found @ found.T
        found = torch.addmm(
            found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a
        )
    return found.T if tall else found
