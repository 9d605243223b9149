"""Chains of cheap operations: run one after another, or compiled into one kernel each.

What a chain costs is its passes over memory: one for each operation, and one in all when it is
compiled: on a CPU from C, on a GPU by TorchInductor. Every chain is part of an autograd function
with a backward pass of its own, so that compiling changes neither what is kept nor which formula is
computed.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from finetune.kernels import cpu
from finetune.planner.kernels import COMPILE_FROM


class Chain:
    """A function of tensors with as many rows each as the first, and of what does not change.

    It is eager, or after `compile_chains(True)` compiled at its first call for any number of rows:
    on a CPU its twin of the same name in C, which answers None for tensors that it is not for.
    """

    compiling = False
    """Of all chains of this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.eager = function

    @functools.cached_property
    def in_c(self) -> Callable[..., Any]:
        return cpu.twin(self.eager.__name__)

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
        return self.by_inductor(*given)

    def by_inductor(self, *given: Any) -> Any:
        """Compiled by TorchInductor; where that fails, eager like all that follows."""
        # One state of autocast for forward and backward passes, which would be compiled for each.
        with torch.autocast(given[0].device.type, enabled=False):
            try:
                return self.compiled(*given)
            except torch._dynamo.exc.TorchDynamoException as error:
                compile_chains(False)
                told = f"note: kernels.pointwise: eager from here on, because {_reason(error)}"
                print(told, file=sys.stderr, flush=True)
                return self.eager(*given)


def chain(function: Callable[..., Any]) -> Chain:
    """Make a chain of a function that has a twin in C."""
    return Chain(function)


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
        return cpu.reason_against_chains(dtype)
    from torch.utils._triton import has_triton  # slow to import

    return failure(device) if has_triton() else "Triton is not installed"


@functools.cache
def failure(device: torch.device) -> str | None:
    """Why a chain cannot be compiled and run on a device; None where one was.

    Triton compiles a module in C when it is first used, for which it needs a compiler and Python's
    headers, and may know no code for a GPU: only a kernel that ran shows that there will be others.
    """
    given = torch.ones(8, 4, device=device)
    try:
        found = torch.compile(_tried)(given)
    except Exception as error:  # of Triton, of a compiler or of a driver: whatever it is
        return f"TorchInductor cannot compile for this {device.type} device: {_reason(error)}"
    return None if bool(torch.isfinite(found).all()) else "a compiled kernel gave wrong numbers"


def _tried(given: torch.Tensor) -> torch.Tensor:
    return (given * 2).sigmoid() + given


def _reason(error: Exception) -> str:
    """The lines of an error that say what is wrong: the compiler's name, and what it said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
