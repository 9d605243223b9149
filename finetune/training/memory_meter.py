"""Measure the memory of this process: its peak, and the peak of tensors during a step."""

import contextlib
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from finetune.kernels import cpu
from finetune.training.gloo_threads import released_on_time

MAPS = Path("/proc/self/maps")
_before: dict[torch.device, int] = {}
"""Peak bytes of each device before its counter was last reset."""


def peak_bytes(device: torch.device) -> int:
    """Peak bytes so far: allocated memory on an accelerator, resident memory on a CPU."""
    if device.type == "cuda":
        return max(_before.get(device, 0), torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Meter:
    """Peak memory of tensors over a forward pass, a backward pass and the update.

    On CUDA this is PyTorch's own counter without cuBLAS's workspaces. On a CPU it is what PyTorch
    has allocated, in its pool and elsewhere, minus what it had before the model was loaded, plus
    weights that are still mapped from their file. Resident memory would also count libraries, the
    code that oneDNN generates for each shape, and freed blocks that glibc keeps. What gloo's
    threads free late does not count (`gloo_threads`), so equal steps have equal peaks. Create the
    meter before the model is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()  # leftovers of an earlier training in this process, else freed during a count
        self.counts = device.type == "cpu" and cpu.keep_sizes()
        self.before = allocated() if self.counts else 0
        self.peak: int | None = None
        """Bytes; None until measured, or if PyTorch does not keep allocation sizes."""

    @contextlib.contextmanager
    def measuring(self, model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
        """Measure the peak inside this context; `other` is a second model in memory."""
        if isinstance(model, DistributedDataParallel):
            # Otherwise its second forward pass does this (torch 2.13) between two measurements.
            model.reducer._rebuild_buckets()
        if self.device.type == "cuda":
            _before[self.device] = peak_bytes(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)  # loading is not part of a step
            yield
            self.peak = torch.cuda.max_memory_allocated(self.device) - workspaces(self.device)
        elif not self.counts:
            yield
        else:
            outside = mapped(model) + (0 if other is None else mapped(other))
            with released_on_time():
                before = _totals()
                with _profile() as profiled:
                    yield
            self.peak = _highest(profiled, before) - self.before + outside


def workspaces(device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds for cuBLAS: on an H100 32 MiB for each thread.

    They are freed to be counted; the next product allocates them again. A plan counts them as a
    part of the context of a process.
    """
    allocated = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return allocated - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def counting(device: torch.device) -> Iterator[list[int]]:
    """Measure new tensors inside this context; on exit their peak bytes are added to the list."""
    found: list[int] = []
    if device.type == "cuda":
        _before[device] = peak_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - allocated)
    else:
        with released_on_time():
            before = _totals()
            with _profile() as profiled:
                yield found
        found.append(_highest(profiled, before) - sum(before))


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def allocated() -> int:
    """Bytes of CPU tensors created since `cpu.keep_sizes` was called."""
    return sum(_totals())


def _totals() -> tuple[int, int]:
    """`allocated` outside the pool, and in it."""
    with _profile() as profiled:
        probe = torch.empty(1)
    for _, event in _allocations(profiled):
        if event.alloc_size > 0:
            return event.total_allocated - probe.nbytes, cpu.handed_out()
    raise AssertionError("a tensor was made while memory was profiled")


def mapped(model: nn.Module) -> int:
    """Bytes of weights still mapped from a file (safetensors maps what it loads)."""
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in MAPS.read_text().splitlines()
        if ".safetensors" in line
    ]
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    return sum(
        size for at, size in weights.items() if any(low <= at < high for low, high in ranges)
    )


def _results(profiled: profile) -> torch.autograd._ProfilerResult:
    inner = profiled.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    return inner.kineto_results


def _allocations(profiled: profile) -> list[tuple[int, Any]]:
    """Start in nanoseconds and fields of each allocation and release, in order of time."""
    found: list[tuple[int, Any]] = []
    nodes = _results(profiled).experimental_event_tree()
    while nodes:
        node = nodes.pop()
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((node.start_time_ns, node.extra_fields))
        nodes += node.children
    return sorted(found, key=lambda each: each[0])


def _highest(profiled: profile, before: tuple[int, int]) -> int:
    """Peak bytes of all tensors, from the totals at the start.

    Reads the running totals of PyTorch and of the pool, because buffers freed by gloo's threads
    are in no profile. Only the pool's events have reserved bytes.
    """
    totals = list(before)
    highest = sum(totals)
    for _, event in _allocations(profiled):
        totals[event.total_reserved > 0] = event.total_allocated
        highest = max(highest, sum(totals))
    return highest
