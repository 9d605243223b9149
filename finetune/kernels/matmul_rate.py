"""Measure this machine's matmul FLOP/s, the base of predicted times and of MFU."""

import time

import torch

SIDES = {"cpu": 512, "cuda": 8192}
SECONDS = 0.1


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products, the best measured within `SECONDS`.

    All processes of a job measure at the same time, as they will train.
    """
    side = SIDES.get(device.type, 4096)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    _product(left, right)  # warm-up: kernel selection and memory allocation
    begun, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - begun < SECONDS or best == float("inf"):
        _product(left, right)
        best = min(best, time.perf_counter() - now)
    if device.type == "cuda":  # exclude this measurement from the memory statistics of training
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * side**3 / best


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left @ right)[0, 0].item()  # waits for the device


def rate_of_products(precision: str) -> float:
    """Matmul FLOP/s of this machine's CPU, with all its cores."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return matmul_flops(torch.device("cpu"), dtype)
