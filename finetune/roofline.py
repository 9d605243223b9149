"""What matrix products alone reach on this machine, for the share of it that training uses."""

import time

import torch

SIZES = {"cpu": 1024, "cuda": 8192}
SECONDS = 0.15


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a square product, the best of those that fit into a fraction of a second.

    Every process measures at once, as they will train.
    """
    size = SIZES.get(device.type, 4096)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    spent = 0.0
    while spent < SECONDS:
        begun = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - begun)
        spent += times[-1] if times[1:] else 0.0  # the first one chose its kernel
    return 2.0 * size**3 / min(times)
