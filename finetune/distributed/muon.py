"""Muon, each matrix complete on one process, whichever engine holds its parts.

The momentum is sharded like the parameter. In a round, each process of a group gets the parts of
one matrix, orthogonalizes it, and sends the parts back; matrices of similar size share a round. So
a step is that of one process, and the work is divided:

    parts of matrices 0, 1     rank 0: a0 b0   rank 1: a1 b1
    exchanged                  rank 0: a0 a1   rank 1: b0 b1
    orthogonalized, returned   rank 0: a0 b0   rank 1: a1 b1
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.distributed.boxes import Box
from finetune.distributed.parameters import local, local_gradient

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Iterations, and the polynomial of each (https://kellerjordan.github.io/posts/muon)."""


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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for round_ in self._rounds(trained):
                updates = [self._momentum(each, group["momentum"]) for each in round_]
                for parameter, update in zip(
                    round_, self._orthogonal(round_, updates), strict=True
                ):
                    weights = local(parameter.data)
                    weights.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                    weights.add_(update.to(weights.device), alpha=-group["lr"] * scale)

    def _rounds(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Matrices that are orthogonalized at the same time, one on each process of their group.

        Stacks need no exchange, because their first dimension is the one that is sharded.
        """
        alike: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.dim() == 3 or _cut_otherwise(parameter):
                yield [parameter]
            else:
                alike.setdefault(self._group(parameter), []).append(parameter)
        for group, matrices in alike.items():
            matrices.sort(key=lambda each: -each.numel() * min(each.shape))
            count = 1 if group is None else group.size()
            for start in range(0, len(matrices), count):
                yield matrices[start : start + count]

    def _group(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The processes that hold the parts of a parameter, or copies of it; None if alone."""
        data = parameter.data
        if not isinstance(data, DTensor):
            return self.copies
        (axis,) = [index for index, each in enumerate(data.placements) if each.is_shard()]
        group = data.device_mesh.get_group(axis)
        return group if group.size() > 1 else None

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        """Update the momentum; this process's part of the update, in the type of the iterations."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.data)
        moment, gradient = local(state["momentum_buffer"]), local_gradient(parameter)
        moment.lerp_(gradient, 1 - momentum)
        return gradient.lerp(moment, momentum).to(self.dtype)

    def _orthogonal(
        self, parameters: list[nn.Parameter], updates: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The parts of the orthogonalized updates of a round."""
        if _cut_otherwise(parameters[0]):
            return [_of_complete(parameters[0], each) for each in updates]
        group = None if parameters[0].dim() == 3 else self._group(parameters[0])
        if group is None:
            return [orthogonalized(each) for each in updates]
        mine = group.rank()
        if not isinstance(parameters[0].data, DTensor):
            if mine < len(updates):
                updates[mine] = orthogonalized(updates[mine]).contiguous()
            for rank, update in enumerate(updates):
                dist.broadcast(update, group=group, group_src=rank)
            return updates
        device = torch.device(parameters[0].data.device_mesh.device_type)
        sent = torch.cat([each.flatten() for each in updates]).to(device)
        parts = [each.numel() for each in updates] + [0] * (group.size() - len(updates))
        shape = parameters[mine].shape if mine < len(parameters) else torch.Size((0, 1))
        size = -(-shape[0] // group.size())  # rows of a part; the last parts have fewer
        rows = [max(0, min(size, shape[0] - rank * size)) for rank in range(group.size())]
        from_all = [count * shape[1] for count in rows]
        matrix = sent.new_empty(shape.numel())
        dist.all_to_all_single(matrix, sent, from_all, parts, group=group)
        if len(matrix):
            matrix = orthogonalized(matrix.view(shape)).flatten()
        dist.all_to_all_single(sent, matrix, parts, from_all, group=group)
        back = zip(sent.split(parts), updates, strict=False)
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
