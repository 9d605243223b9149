"""Chains of cheap operations: run one after another, or compiled into one kernel each.

What a chain costs is its passes over memory: one for each operation, and one in all when it is
compiled: on a CPU from C, on a GPU by TorchInductor. Every chain is part of an autograd function
with a backward pass of its own, so that compiling changes neither what is kept nor which formula is
computed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from finetune.kernels.cpu import native
from finetune.planner.kernels import COMPILE_FROM


class Chain:
    """A function of tensors with as many rows each as the first, and of what does not change.

    It is eager, or after `compile_chains(True)` compiled at its first call for any number of rows:
    on a CPU `in_c`, which answers None for tensors that it is not for.
    """

    compiling = False
    """Of all chains of this process."""

    def __init__(self, function: Callable[..., Any], in_c: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.eager, self.in_c = function, in_c

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.eager)

    def __call__(self, *given: Any) -> Any:
        if not Chain.compiling:
            return self.eager(*given)
        if given[0].is_cpu:
            with torch.profiler.record_function(f"chain::{self.eager.__name__}"):
                found = self.in_c(*given)
            return self.eager(*given) if found is None else found
        rows = given[0].shape[0]
        for each in given:
            if isinstance(each, torch.Tensor) and each.shape[0] == rows:
                torch._dynamo.maybe_mark_dynamic(each, 0)
        # One state of autocast for forward and backward passes, which would be compiled for each.
        with torch.autocast(given[0].device.type, enabled=False):
            return self.compiled(*given)


def chain(in_c: Callable[..., Any]) -> Callable[[Callable[..., Any]], Chain]:
    """Make a chain of a function whose twin in C is given."""
    return functools.partial(Chain, in_c=in_c)


def compile_chains(on: bool) -> None:
    """Let every chain of this process be compiled, or run operation by operation."""
    Chain.compiling = on


def settle(
    asked: str, device: torch.device, tokens: float, dtype: torch.dtype
) -> tuple[bool, str | None]:
    """Whether chains are compiled, and what is to be said of it.

    Args:
        asked: `kernels.pointwise`.
        tokens: of the whole run; not of a process, so that any number of them decides alike.
        dtype: that it computes in.
    """
    least = COMPILE_FROM.get(device.type)
    if asked == "eager":
        return False, None
    if asked == "auto" and (least is None or tokens < least):
        rule = f"compiled from {least:,} on" if least else f"never compiled on {device.type}"
        return False, f"kernels.pointwise: eager, for {tokens:,.0f} tokens ({rule})"
    reason = reason_against(device, dtype)
    if reason is not None:
        return False, f"kernels.pointwise: eager, because {reason}"
    return True, f"kernels.pointwise: compiled, for {tokens:,.0f} tokens"


def usual_folder() -> str:
    """Where TorchInductor keeps its code by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    return default_cache_dir()


def reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing can be compiled for a device on this machine; None where it can."""
    if device.type == "cpu":
        return native.reason_against(dtype)
    from torch.utils._triton import has_triton  # slow to import

    return None if has_triton() else "Triton is not installed"
