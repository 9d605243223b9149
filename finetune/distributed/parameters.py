"""Shapes and values of unsharded parameters, for any engine."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 partitions a parameter; only `deepspeed.zero.Init` sets this attribute."""
    return getattr(parameter, "ds_id", None) is not None


def unsharded_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", None) or parameter.shape  # ds_shape: ZeRO-3 only


def unsharded_numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()  # ds_numel: ZeRO-3 only


def unsharded_values(parameter: nn.Parameter) -> torch.Tensor:
    """A host copy of the unsharded parameter; every rank must call this."""
    if isinstance(parameter.data, DTensor):
        return to_host(parameter.data.full_tensor())
    if not partitioned(parameter):
        return to_host(parameter)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return to_host(parameter)


def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Copy unsharded values into a parameter; every rank must call this."""
    data = parameter.data
    if isinstance(data, DTensor):
        part = distribute_tensor(
            value.to(data.device, data.dtype), data.device_mesh, data.placements, src_data_rank=None
        )
        data.to_local().copy_(part.to_local())
        return
    if not partitioned(parameter):
        parameter.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.copy_(value)


def to_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True).contiguous()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient: where its parameter is cut, tensor parallelism may not be."""
    data, gradient = parameter.data, parameter.grad
    assert gradient is not None
    if isinstance(data, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=data.placements)
    return local(gradient).detach()


def row_state(
    parameter: nn.Parameter, *inner: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Zeros (rows, *inner) for a state of each row, which is cut as the parameter is."""
    data, shape = parameter.data, torch.Size((len(parameter), *inner))
    if not isinstance(data, DTensor):
        return torch.zeros(shape, dtype=dtype, device=data.device)
    mesh, placements = data.device_mesh, data.placements
    part, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    zeros = torch.zeros(part, dtype=dtype, device=data.device)
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=shape, stride=stride)


def moment_elements(states: Iterable[dict[str, Any]]) -> int:
    """Elements of the first moments: the maximum over the kinds of optimizer state."""
    totals: dict[str, int] = {}
    for values in states:
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                totals[key] = totals.get(key, 0) + local(value).numel()
    return max(totals.values(), default=0)
