"""A whole parameter, however the engine has cut it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 partitions it: set by `deepspeed.zero.Init` only."""
    return getattr(parameter, "ds_id", None) is not None


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", None) or parameter.shape  # ds_shape: ZeRO-3 only


def whole_numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()  # ds_numel: ZeRO-3 only


def whole_values(parameter: nn.Parameter) -> torch.Tensor:
    """A host copy of all of a parameter; every rank must call this."""
    if isinstance(parameter.data, DTensor):
        return to_host(parameter.data.full_tensor())
    if not partitioned(parameter):
        return to_host(parameter)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return to_host(parameter)


def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Put whole values into a parameter; every rank must call this."""
    if not partitioned(parameter):
        parameter.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.copy_(value)


def to_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True).contiguous()
