"""Adafactor (arXiv:1804.04235), the same for a matrix whose rows are on several processes.

The second moments of a matrix are those of its rows times those of its columns. A process has
complete rows, so it knows their means; sums over columns, and the norms of a matrix and of its
update, are summed over the processes, for many tensors at once. So a step is that of one process.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.distributed.parameters import local, local_gradient, row_state

CHUNK = 2**24
"""Elements whose sums are exchanged together, and whose updates are in memory meanwhile."""

Groups = tuple[dist.ProcessGroup, ...]


class Adafactor(torch.optim.Optimizer):
    """Adafactor with the arguments and the state of `torch.optim.Adafactor` in torch 2.13."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if beta2_decay > 0 or d < 1 or len(eps) != 2:
            raise ValueError("expected beta2_decay of at most 0, d of at least 1, and a pair eps")
        given = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(params, {**given, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            alike: dict[Groups, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(_groups(parameter), []).append(parameter)
            for groups, parameters in alike.items():
                for some in _chunks(parameters, 1 if not groups else CHUNK):
                    self._update([_Tensor(each, self.state[each], group) for each in some], groups)

    def _update(self, tensors: list["_Tensor"], groups: Groups) -> None:
        sums = _summed([each.squares() for each in tensors], groups)
        updates = [each.update(*parts) for each, parts in zip(tensors, sums, strict=True)]
        norms = _summed([(update.square().sum(),) for update in updates], groups)
        for each, update, (square,) in zip(tensors, updates, norms, strict=True):
            each.apply(update, square)


class _Tensor:
    """This process's rows of a parameter in a step."""

    def __init__(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]):
        self.shape, self.numel = parameter.shape, parameter.numel()
        self.factored = len(self.shape) > 1 and min(self.shape[-2:]) > 1  # else exact as it is
        if not state:
            state["step"] = 0.0
            if self.factored:
                state["row_var"] = row_state(parameter, *self.shape[1:-1], 1)
                wide = *self.shape[1:-2], 1, self.shape[-1]
                # A stack is cut between its matrices; of a matrix, each process has all columns.
                stacked = len(self.shape) > 2
                state["col_var"] = (
                    row_state(parameter, *wide)
                    if stacked
                    else torch.zeros(wide, device=local(parameter.data).device)
                )
            else:
                state["variance"] = torch.zeros_like(parameter.data)
        state["step"] = self.step = float(state["step"]) + 1
        self.weight, self.gradient = local(parameter.data), local_gradient(parameter).float()
        self.state = {key: local(each) for key, each in state.items() if key != "step"}
        self.group, first = group, group["eps"][0]
        self.eps = torch.finfo(parameter.dtype).eps if first is None else first
        self.new = self.step ** group["beta2_decay"]

    def squares(self) -> tuple[torch.Tensor, ...]:
        """The sums to exchange: of the weights' squares, and of a matrix by columns and rows."""
        found = (self.weight.float().square().sum(),)
        if not self.factored:
            self.state["variance"].lerp_(self.gradient.square(), self.new)
            return found
        rows = self.gradient.norm(dim=-1, keepdim=True).square_().div_(self.shape[-1])
        rows = self.state["row_var"].lerp_(rows, self.new)
        columns = self.gradient.norm(dim=-2, keepdim=True).square_()
        if len(self.shape) > 2:
            self.rows, self.columns = rows.sum(dim=-2, keepdim=True), columns
            return found
        return *found, columns, rows.sum(dim=-2, keepdim=True)

    def update(self, square: torch.Tensor, *sums: torch.Tensor) -> torch.Tensor:
        """The update before it is clipped, from the sums over all processes."""
        self.alpha = (square / self.numel).sqrt_().clamp_(min=self.group["eps"][1])
        self.alpha *= min(self.group["lr"], 1 / math.sqrt(self.step))
        if self.factored:
            columns, rows = sums or (self.columns, self.rows)
            columns = self.state["col_var"].lerp_(columns / self.shape[-2], self.new)
            estimate = self.state["row_var"] @ columns
            estimate.div_((rows / self.shape[-2]).clamp_(min=self.eps))
        else:
            estimate = self.state["variance"].clone()
        return estimate.clamp_(min=self.eps**2).rsqrt_().mul_(self.gradient)

    def apply(self, update: torch.Tensor, square: torch.Tensor) -> None:
        """Decay the weights, and add the update, whose RMS is clipped at `d`."""
        self.weight.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        clip = (square / self.numel).sqrt_().div_(self.group["d"]).clamp_(min=1)
        self.weight.sub_(update.mul_(self.alpha / clip))


def _groups(parameter: nn.Parameter) -> Groups:
    """The groups of processes that hold the parts of a parameter, one for each axis."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return ()
    cut = [axis for axis, each in enumerate(data.placements) if not each.is_replicate()]
    groups = (data.device_mesh.get_group(axis) for axis in cut)
    return tuple(group for group in groups if group.size() > 1)


def _chunks(parameters: list[nn.Parameter], elements: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in their order, in lists that end when they have so many elements."""
    found: list[nn.Parameter] = []
    for each in parameters:
        found.append(each)
        if sum(one.numel() for one in found) >= elements:
            yield found
            found = []
    if found:
        yield found


def _summed(
    values: list[tuple[torch.Tensor, ...]], groups: Groups
) -> list[tuple[torch.Tensor, ...]]:
    """Sums over processes of the tensors of each entry, in one collective for each group."""
    if not groups:
        return values
    flat = torch.cat([each.flatten() for entry in values for each in entry])
    for group in groups:
        dist.all_reduce(flat, group=group)
    parts = iter(flat.split([each.numel() for entry in values for each in entry]))
    return [tuple(next(parts).view(each.shape) for each in entry) for entry in values]
