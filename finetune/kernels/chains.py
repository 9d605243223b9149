"""Chains of cheap operations: run one after another, or compiled into one kernel each.

What a chain costs is its passes over memory: one for each operation, and one in all when
TorchInductor has compiled it. Every chain is part of an autograd function with a backward pass of
its own, so that compiling changes neither what is kept nor which formula is computed.
"""

import functools
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COMPILE_FROM = {"cpu": 300_000, "cuda": 3_000_000}
"""Tokens of a process from which `kernels.pointwise=auto` compiles: an estimate, that compiling
(about 20 seconds of one core in torch 2.13) is paid back by then. It was not measured on a GPU."""


class Chain:
    """A function of tensors with as many rows each as the first, and of what does not change.

    It is eager, or after `compile_chains(True)` compiled at its first call for any number of rows.
    """

    compiling = False
    """Of all chains of this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.eager = function

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.eager)

    def __call__(self, *given: Any) -> Any:
        if not Chain.compiling:
            return self.eager(*given)
        rows = given[0].shape[0]
        for each in given:
            if isinstance(each, torch.Tensor) and each.shape[0] == rows:
                torch._dynamo.maybe_mark_dynamic(each, 0)
        # One state of autocast for forward and backward passes, which would be compiled for each.
        with torch.autocast(given[0].device.type, enabled=False):
            return self.compiled(*given)


def compile_chains(on: bool) -> None:
    """Let every chain of this process be compiled, or run operation by operation."""
    Chain.compiling = on


def settle(asked: str, device: torch.device, tokens: float) -> tuple[bool, str | None]:
    """Whether chains are compiled, and what is to be said of it.

    Args:
        asked: `kernels.pointwise`.
        tokens: that this process computes in the whole run.
    """
    least = COMPILE_FROM.get(device.type)
    if asked == "eager":
        return False, None
    if asked == "auto" and (least is None or tokens < least):
        rule = f"compiled from {least:,} on" if least else f"never compiled on {device.type}"
        return False, f"kernels.pointwise: eager, for {tokens:,.0f} tokens in each process ({rule})"
    reason = reason_against(device)
    if reason is not None:
        return False, f"kernels.pointwise: eager, because {reason}"
    return True, f"kernels.pointwise: compiled, for {tokens:,.0f} tokens in each process"


def usual_folder() -> str:
    """Where TorchInductor keeps its code by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    return default_cache_dir()


def reason_against(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device on this machine; None where it can."""
    # Slow to import, and of no use to a run that compiles nothing.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu" and not has_triton():
        return "Triton is not installed"
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return "this machine has no C++ compiler"
    if shutil.which(compiler) is None:
        return "this machine has no C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the headers of Python are not installed (python3-dev)"
    return None
