"""Chains of cheap operations, run one by one or compiled into one kernel each.

The cost of a chain is its passes over memory: one per operation, or a single pass if it is
compiled, on CPUs from C and on GPUs by TorchInductor. Every chain is part of an autograd function
with a custom backward pass, so compiling changes neither the saved tensors nor the formula.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from finetune.kernels import cpu
from finetune.planner.kernels import COMPILE_FROM


class Chain:
    """A function of tensors that share their number of rows, and of other values.

    It runs eagerly or, after `compile_chains(True)`, compiled for any number of rows: on CPUs as
    the C function of the same name, which returns None for unsupported tensors.
    """

    compiling = False
    """Whether all chains of this process are compiled."""

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
        """Run compiled by TorchInductor; if that fails, switch all chains to eager."""
        # One autocast state for forward and backward, to avoid compiling for each.
        with torch.autocast(given[0].device.type, enabled=False):
            try:
                return self.compiled(*given)
            except torch._dynamo.exc.TorchDynamoException as error:
                compile_chains(False)
                told = f"note: kernels.pointwise: eager from here on, because {_reason(error)}"
                print(told, file=sys.stderr, flush=True)
                return self.eager(*given)


def chain(function: Callable[..., Any]) -> Chain:
    """Decorate a function that has a C implementation as a chain."""
    return Chain(function)


def compile_chains(on: bool) -> None:
    """Compile all chains of this process, or run them operation by operation."""
    Chain.compiling = on


def settle(
    asked: str, device: torch.device, tokens: float, dtype: torch.dtype
) -> tuple[bool, str | None]:
    """Whether to compile chains, and a note for the log.

    Args:
        asked: The recipe's `kernels.pointwise`.
        device: Device that trains.
        tokens: Tokens of the run over all processes, so their number does not change the decision.
        dtype: Compute data type.
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
    """TorchInductor's default cache folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    return default_cache_dir()


def reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why chains cannot be compiled for a device on this machine; None if they can."""
    if device.type == "cpu":
        return cpu.reason_against_chains(dtype)
    return against_inductor(device)


def against_inductor(device: torch.device) -> str | None:
    """Why TorchInductor cannot compile for a device on this machine; None if it can."""
    if device.type == "cpu":
        return failure(device)
    from torch.utils._triton import has_triton  # slow to import

    return failure(device) if has_triton() else "Triton is not installed"


@functools.cache
def failure(device: torch.device) -> str | None:
    """Why a test kernel cannot be compiled and run on a device; None if it ran.

    Triton compiles a C module on first use, which needs a compiler and Python's headers, and it may
    not support the GPU. Only running a kernel shows whether it works.
    """
    given = torch.ones(8, 4, device=device)
    try:
        found = torch.compile(_tried)(given)
    except Exception as error:  # any error of Triton, a compiler or a driver
        return f"TorchInductor cannot compile for this {device.type} device: {_reason(error)}"
    return None if bool(torch.isfinite(found).all()) else "a compiled kernel returned wrong numbers"


def _tried(given: torch.Tensor) -> torch.Tensor:
    return (given * 2).sigmoid() + given


def _reason(error: Exception) -> str:
    """The first two lines of an error: the compiler's name, and its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
