"""How fast this machine multiplies matrices: what a prediction of time on a CPU begins with."""

import time

import torch

SIDE = 512
SECONDS = 0.1


def matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of square products on the CPU, the best of those that fit into `SECONDS`."""
    left, right = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    torch.mm(left, right)  # kernels are chosen, memory is laid out
    begun, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - begun < SECONDS or best == float("inf"):
        torch.mm(left, right)
        best = min(best, time.perf_counter() - now)
    return 2 * SIDE**3 / best
