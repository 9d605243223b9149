"""Memory of large tensors on CPUs: a pool of their own, from C++ that is compiled when first used.

glibc's `malloc` (2.36) cannot give an aligned block that was freed to the next tensor of its size:
gaps stay, and each step takes pages that are new to the process, which the kernel has to clear. In
a pool that holds nothing but large tensors, each step has the memory of the one before. A GPU's
memory is pooled by PyTorch.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled
from finetune.planner.kernels import POOL_FROM

SOURCE = Path(__file__).with_name("pool.cpp")
TORCH = Path(torch.__file__).parent
RESERVED = 4
"""Addresses, as a multiple of the machine's memory: what is reserved takes none of it."""


def settle(asked: str, device: torch.device, tokens: float) -> tuple[bool, str | None]:
    """Whether large tensors are pooled, and what is to be said of it.

    Args:
        asked: `kernels.allocator`.
        device: that trains.
        tokens: of the whole run.
    """
    if device.type != "cpu" or asked == "plain":
        return False, None
    if asked == "auto" and tokens < POOL_FROM:
        rule = f"pooled from {POOL_FROM:,} on"
        return False, f"kernels.allocator: plain, for {tokens:,.0f} tokens ({rule})"
    reason = reason_against()
    if reason is not None:
        return False, f"kernels.allocator: plain, because {reason}"
    return True, f"kernels.allocator: pooled, for {tokens:,.0f} tokens"


def use_pool(on: bool) -> None:
    """Let large tensors that this process makes from now on be pooled, or be `malloc`'s again.

    Where there is no pool (`reason_against`) nothing changes. Switched off, it gives the system
    back what no tensor holds.
    """
    if (on or _was_asked_for()) and not isinstance(found := _library(), str):
        found.use(on)


def handed_out() -> int:
    """Bytes of blocks that tensors hold."""
    found = _library() if _was_asked_for() else None
    return found.handed_out() if isinstance(found, ctypes.CDLL) else 0


def _was_asked_for() -> bool:
    """Whether there is an answer already, for which nothing is compiled."""
    return _library.cache_info().currsize > 0


def reason_against() -> str | None:
    """Why there is no pool on this machine; None where there is."""
    found = _library()
    return found if isinstance(found, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The pool, which PyTorch asks from now on, or why there is none."""
    if sys.platform != "linux":
        return "it is for Linux"
    new = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={new}", f"-I{TORCH / 'include'}"]
    try:
        found = compiled(SOURCE, flags, [f"-L{TORCH / 'lib'}", "-lc10"], torch.__version__)
    except CannotCompile as error:
        return str(error)
    found.install.argtypes, found.install.restype = (ctypes.c_size_t,), ctypes.c_bool
    found.use.argtypes, found.use.restype = (ctypes.c_bool,), None
    found.handed_out.restype = ctypes.c_size_t
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not found.install(RESERVED * memory):
        return "this process may not reserve addresses (ulimit -v)"
    return found
