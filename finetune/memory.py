"""Memory of this process as the record counts it."""

import contextlib
import ctypes
import gc
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from finetune.kernels import pool

MAPS = Path("/proc/self/maps")


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Meter:
    """The peak of what training allocates, counted over a forward and backward pass and the update.

    On CUDA it is PyTorch's own count. A CPU has none, and resident memory would not do: libraries
    outweigh a small model, and glibc keeps freed blocks. There it is what `malloc` and the pool of
    large tensors had handed out when the measurement began, less what they had before the model was
    loaded, plus weights that are still mapped from their file, plus the highest sum of PyTorch's
    allocations since. Made before the model is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()  # what an earlier training of this process left, which would be freed later
        self.before = handed_out() or 0
        self.peak: int | None = None
        """Bytes; None until it was measured, and where it cannot be (a CPU without glibc)."""

    @contextlib.contextmanager
    def measuring(self, model: nn.Module) -> Iterator[None]:
        """Inside, memory is counted."""
        if isinstance(model, DistributedDataParallel):
            # Its second forward pass would do so (torch 2.13), and free blocks that the profiler
            # knows nothing of.
            model.reducer._rebuild_buckets()
        begun = handed_out()
        if self.device.type == "cuda":
            yield
            self.peak = torch.cuda.max_memory_allocated(self.device)
        elif begun is None:
            yield
        else:
            held = begun - self.before + mapped(model)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                yield
            self.peak = held + _highest_sum(profiled)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def handed_out() -> int | None:
    """Bytes that `malloc` and the pool of large tensors have handed out and not got back.

    None without glibc 2.33 or later.
    """
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 33):
        return None
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Mallinfo
    found = read()
    return found.uordblks + found.hblkhd + pool.handed_out()


def mapped(model: nn.Module) -> int:
    """Bytes of weights that lie in the pages of a file (safetensors maps what it loads)."""
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in MAPS.read_text().splitlines()
        if ".safetensors" in line
    ]
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    return sum(
        size for at, size in weights.items() if any(low <= at < high for low, high in ranges)
    )


def _highest_sum(profiled: profile) -> int:
    """The largest sum of allocations less releases.

    torch 2.13 does not report on a CPU that a block of `malloc` from before the profile is freed.
    """
    inner = profiled.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    events = [e for e in inner.kineto_results.events() if e.name() == MEMORY_EVENT_NAME]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest
