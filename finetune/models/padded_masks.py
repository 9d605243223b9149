"""Build the attention mask of padded rows in training without reading their padding on the host."""

from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


def padded_mask(
    *given: Any, attention_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor | None:
    """transformers' mask for SDPA, (rows, 1, length, length) of bool, or None if it is causal.

    transformers 5.23 reads the mask of the rows twice per micro-batch, to omit it if nothing is
    padded, and each time waits for the GPU. In training, a mask is given only if a row is padded.
    """
    if attention_mask is not None and torch.is_grad_enabled():
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*given, attention_mask=attention_mask, **options)


def mask_without_reading() -> None:
    """Make transformers' models with `attention=sdpa` use `padded_mask`."""
    AttentionMaskInterface.register("sdpa", padded_mask)
