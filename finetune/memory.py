"""Memory of this process as the record counts it."""

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
