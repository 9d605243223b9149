"""Memory pool for large CPU tensors, from C++ code that is compiled on first use.

glibc's `malloc` (2.36) cannot reuse a freed aligned block for the next tensor of the same size:
gaps remain, and each step uses new pages, which the kernel has to zero. In a pool of large tensors
only, each step reuses the memory of the previous one. PyTorch pools GPU memory itself.
"""

import ctypes
import functools
import sys
from pathlib import Path

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled
from finetune.planner.kernels import POOL_FROM
from finetune.runs import limits

SOURCE = Path(__file__).with_name("pool.cpp")
TORCH = Path(torch.__file__).parent
CORE = TORCH / "lib" / "libc10.so"
SWITCH = "FLAGS_caffe2_report_cpu_memory_usage"
"""A libc10 variable (torch 2.13): while it is true, PyTorch records the size of each CPU block, so
that blocks allocated before a profile are accounted for when they are freed."""
RESERVED = 4
"""Reserved addresses as a multiple of the machine's memory; reserving takes no memory."""


def settle(asked: str, device: torch.device, tokens: float) -> tuple[bool, str | None]:
    """Whether to pool large tensors, and a note for the log.

    Args:
        asked: The recipe's `kernels.allocator`.
        device: Device that trains.
        tokens: Tokens of the run.
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
    """Allocate large tensors of this process from the pool, or with `malloc` again.

    Has no effect without a pool (`reason_against`). Switching the pool off returns its unused
    memory to the system.
    """
    if (on or _was_asked_for()) and not isinstance(found := _library(), str):
        found.use(on)


def handed_out() -> int:
    """Bytes of the pool's blocks that tensors use."""
    found = _library() if _was_asked_for() else None
    return found.handed_out() if isinstance(found, ctypes.CDLL) else 0


def _was_asked_for() -> bool:
    """Whether the library was already requested, so that nothing has to be compiled now."""
    return _library.cache_info().currsize > 0


def reason_against() -> str | None:
    """Why there is no pool on this machine; None if there is one."""
    found = _library()
    return found if isinstance(found, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Install the pool as PyTorch's CPU allocator; returns it, or why there is none."""
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
    if not found.install(RESERVED * limits.memory().total):
        return "this process may not reserve addresses (ulimit -v)"
    return found


def keep_sizes() -> bool:
    """Make PyTorch record the sizes of its blocks (`SWITCH`); returns whether it can."""
    try:
        ctypes.c_bool.in_dll(ctypes.CDLL(str(CORE)), SWITCH).value = True
    except (OSError, ValueError):  # another build of PyTorch
        return False
    return True
