"""Trace divided experts as if the router sent equally many tokens to each of them.

transformers 5.23 reads how many tokens a process sends to each of the others, and how many it
receives, from a tensor; fake tensors have no values.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers.distributed.expert_parallel import AllToAllEP, AutoEP, EPImplementationInterface


def register() -> None:
    """Replace transformers' default way to reach divided experts, for this process."""
    EPImplementationInterface.register("auto", _Automatic)


class _Automatic(AutoEP):
    """transformers' default, with sizes that are known without values."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.all_to_all = _Balanced(experts, ep_mesh, tp_mesh)


class _Balanced(AllToAllEP):
    """transformers' exchange of tokens, of which every process of the group gets an equal share."""

    def _dispatch_tokens(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        # `Shard(0)` of a tensor parallel group: the first process has the largest slice.
        tokens = math.ceil(hidden_states.shape[0] / self.tp_mesh.size())
        shares = _shares(tokens * top_k_index.shape[-1], self.ep_mesh.size())
        with _Values([*shares, *shares]):  # sent, received
            return super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)


def _shares(total: int, ways: int) -> list[int]:
    """`total` as `ways` whole numbers that differ by at most one."""
    ends = [total * way // ways for way in range(ways + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


class _Values(TorchFunctionMode):
    """Returns the given numbers, in order, when values of tensors are read."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = iter(numbers)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.item:
            return next(self.numbers)
        return func(*args, **(kwargs or {}))
