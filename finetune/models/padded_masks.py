"""Build the attention mask of padded rows without reading their padding on the host."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask


def mask_without_reading(model: PreTrainedModel) -> None:
    """Make a model of transformers build its attention masks without waiting for the GPU.

    Models of other code get no mask that they do not expect.
    """
    AttentionMaskInterface.register("sdpa", padded_mask)
    AttentionMaskInterface.register("flash_attention_2", padded_flash_mask)
    core = model.base_model
    if type(core).__module__.startswith("transformers."):
        core.register_forward_pre_hook(mask_nothing, with_kwargs=True)


def mask_nothing(
    _: nn.Module, words: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass on `nothing_masked` if rows without padding have no mask.

    Without a mask transformers 5.23 looks for concatenated documents, and waits for the GPU.
    """
    known = ("attention_mask", "position_ids", "past_key_values")
    if words or given.get("use_cache") is not False:
        return None
    if any(given.get(name) is not None for name in known):
        return None
    ids, hidden = given.get("input_ids"), given.get("inputs_embeds")
    rows = ids if ids is not None else hidden[..., 0]  # (rows, length)
    return words, given | {"attention_mask": nothing_masked(rows)}


def nothing_masked(rows: torch.Tensor) -> torch.Tensor:
    """The attention mask of rows without padding, a bool for all of (rows, length)."""
    return torch.ones((), dtype=torch.bool, device=rows.device).expand(rows.shape)


def masks_nothing(mask: torch.Tensor | None) -> bool:
    """Whether a mask is one of `nothing_masked`, without reading its values."""
    return mask is not None and not any(mask.stride())


def padded_mask(
    *given: Any, attention_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor | None:
    """transformers' mask for SDPA, (rows, 1, length, length) of bool, or None if it is causal.

    transformers 5.23 reads the mask of the rows twice per micro-batch, to omit it if nothing is
    padded, and each time waits for the GPU. In training, a mask is given only if a row is padded.
    """
    if masks_nothing(attention_mask):
        attention_mask = None
    if attention_mask is not None and torch.is_grad_enabled():
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*given, attention_mask=attention_mask, **options)


def padded_flash_mask(
    *given: Any, attention_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor | None:
    """transformers' mask for flash attention, (rows, length) of bool, or None without padding."""
    if masks_nothing(attention_mask):
        return None
    return flash_attention_mask(*given, attention_mask=attention_mask, **options)
