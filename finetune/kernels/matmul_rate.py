"""Measure this machine's matmul FLOP/s, the base of predicted times and of MFU."""

import time

import torch

SIDES = {"cpu": 512, "cuda": 8192}
SECONDS = 0.1


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square products, the best of those that fit into `SECONDS`.

    Every process of a job measures at once, as they will train.
    """
    side = SIDES.get(device.type, 4096)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    _product(left, right)  # kernels are chosen, memory is laid out
    begun, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - begun < SECONDS or best == float("inf"):
        _product(left, right)
        best = min(best, time.perf_counter() - now)
    if device.type == "cuda":  # what was measured with is no part of what training takes
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * side**3 / best


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left @ right)[0, 0].item()  # waits for the device


def rate_of_products(precision: str) -> float:
    """FLOP/s that this machine's CPU multiplies matrices with, all cores together."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return matmul_flops(torch.device("cpu"), dtype)
