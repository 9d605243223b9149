"""Data type of matrix products."""

import torch


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Autocast's data type if it is enabled, else the type of a weight that the engine gathered."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
