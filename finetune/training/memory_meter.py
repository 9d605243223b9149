"""Memory of this process as the record counts it."""

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

MAPS = Path("/proc/self/maps")
_before: dict[torch.device, int] = {}
"""Largest memory of each device before its count began anew."""


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on a CPU."""
    if device.type == "cuda":
        return max(_before.get(device, 0), torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Meter:
    """The peak of what tensors take, counted over a forward and backward pass and the update.

    On CUDA it is PyTorch's own count. On a CPU it is what PyTorch has allocated, in its pool and
    elsewhere, less what it had before the model was loaded, plus weights that are still mapped from
    their file. Libraries, and code that oneDNN writes for each shape, are not tensors; resident
    memory would count them, and blocks that glibc keeps. Made before the model is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()  # what an earlier training of this process left, which would be freed later
        self.counts = device.type == "cpu" and cpu.keep_sizes()
        self.before = allocated() if self.counts else 0
        self.peak: int | None = None
        """Bytes; None until it was measured, and where PyTorch keeps no sizes."""

    @contextlib.contextmanager
    def measuring(self, model: nn.Module, other: nn.Module | None = None) -> Iterator[None]:
        """Inside, memory is counted; `other` is a second model that is there."""
        if isinstance(model, DistributedDataParallel):
            # Its second forward pass would do so (torch 2.13), between two counts.
            model.reducer._rebuild_buckets()
        if self.device.type == "cuda":
            _before[self.device] = peak_bytes(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)  # loading is no part of a step
            yield
            self.peak = torch.cuda.max_memory_allocated(self.device)
        elif not self.counts:
            yield
        else:
            held = allocated() - self.before + mapped(model)
            held += 0 if other is None else mapped(other)
            with _profile() as profiled:
                yield
            self.peak = held + _highest_rise(profiled)


@contextlib.contextmanager
def counting(device: torch.device) -> Iterator[list[int]]:
    """Inside, memory of new tensors is counted: the list then holds its largest bytes."""
    found: list[int] = []
    if device.type == "cuda":
        _before[device] = peak_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - held)
    else:
        with _profile() as profiled:
            yield found
        found.append(_highest_rise(profiled))


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def allocated() -> int:
    """Bytes that tensors on the CPU have, of those that were made since sizes are kept."""
    with _profile() as profiled:
        probe = torch.empty(1)
    for _, event in _allocations(profiled):
        if event.alloc_size > 0:
            return event.total_allocated - probe.nbytes + cpu.handed_out()
    raise AssertionError("a tensor was made while memory was profiled")


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


def _results(profiled: profile) -> torch.autograd._ProfilerResult:
    inner = profiled.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    return inner.kineto_results


def _allocations(profiled: profile) -> list[tuple[int, Any]]:
    """Nanoseconds and facts of each allocation and release that was seen, in their order."""
    found: list[tuple[int, Any]] = []
    nodes = _results(profiled).experimental_event_tree()
    while nodes:
        node = nodes.pop()
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((node.start_time_ns, node.extra_fields))
        nodes += node.children
    return sorted(found, key=lambda each: each[0])


def _highest_rise(profiled: profile) -> int:
    """The most bytes that there were at once over those at the start.

    By the totals that PyTorch and the pool keep of themselves: buffers that gloo's threads free are
    events of no profile. The pool alone says how much it has reserved.
    """
    rises = {True: 0, False: 0}
    before = dict[bool, int]()
    highest = 0
    for _, event in _allocations(profiled):
        pooled = event.total_reserved > 0
        start = before.setdefault(pooled, event.total_allocated - event.alloc_size)
        rises[pooled] = event.total_allocated - start
        highest = max(highest, sum(rises.values()))
    return highest
