"""The data type that matrices are multiplied in."""

import torch


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Autocast's, where it is on; else that of a weight as the engine gathered it."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
