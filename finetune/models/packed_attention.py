"""Attention for concatenated documents: causal within each, and never across a boundary.

It is registered with transformers as an attention implementation. The model passes on the document
boundaries of the batch (`cu_seq_lens_q`, as for flash attention), so no mask across documents is
built:

    tokens    a b c d | e f | g h i        one causal product per document on CPU,
    sees      a         e     g            one variable-length kernel on GPU
              a b       e f   g h
              a b c           g h i
              a b c d
"""

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from finetune.errors import FinetuneError
from finetune.kernels import cpu
from finetune.kernels.pointwise import Chain
from finetune.kernels.precision import compute_dtype
from finetune.kernels.repeated import repeated
from finetune.planner.families import family_of
from finetune.planner.kernels import against_one_call
from finetune.planner.padding import Padding, leaks, padding
from finetune.recipe import Recipe

DOCUMENTS = "documents"
"""Name of this attention implementation in transformers."""

VARLEN_FROM = (8, 0)
"""Minimum compute capability (Ampere) of PyTorch 2.13's variable-length flash kernel."""
LARGEST_HEAD = 256
"""Maximum head size of that kernel."""
HOPPER = 9
"""Major compute capability of GPUs with their own attention kernels."""
ALONE_FROM = 2_048
"""Minimum tokens of a single document that uses PyTorch's attention on Hopper."""
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Capabilities with too little shared memory for its backward pass with heads of 193 to 224
(torch 2.13)."""


def layout(recipe: Recipe, config: PreTrainedConfig) -> Padding:
    """The layout of a recipe's rows for a model with this config, as loaded."""
    return padding(recipe, config.to_dict())


def implementation(recipe: Recipe, config: PreTrainedConfig) -> str:
    """Attention implementation for transformers: `documents` for SDPA with concatenated rows."""
    attention = recipe.model.attention
    if attention == "sdpa" and layout(recipe, config).free:
        return DOCUMENTS
    return attention


def refuse_other_layout(field: str, recipe: Recipe, config: PreTrainedConfig, first: bool) -> None:
    """Refuse a second model that would mix documents which the trained model keeps apart.

    Args:
        field: Field of the recipe that names the second model.
        recipe: Recipe that trains, or one with the second model in place of the trained one.
        config: Config of the second model, as loaded.
        first: Whether the rows of the trained model are concatenated.

    Raises:
        FinetuneError: with what to set instead.
    """
    if first and leaks(config.to_dict(), recipe.batch.max_length):
        raise FinetuneError(
            f"{field}: {config.model_type} is not known to keep concatenated documents apart, as "
            "the trained model does; set batch.padding_free=false and batch.packing=false"
        )


def attention_notes(config: PreTrainedConfig, precision: str, longest: int) -> list[str]:
    """Notes if concatenated documents cannot use the fastest attention of this machine.

    Args:
        config: Model config, as loaded.
        precision: Precision of the run.
        longest: Maximum tokens of a document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dropped = bool(getattr(config, "attention_dropout", 0))
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = family_of(config.model_type).sinks
    found = against_one_call(device, precision, dropped, capped, sinks)
    instead = ""
    if device == "cuda":
        lacking = against_varlen(torch.device("cuda"), _head_size(config))
        found += [] if lacking is None else [lacking]
        instead = "one kernel call per document, not one variable-length kernel"
    elif Chain.compiling and precision == "bf16":
        lacking = cpu.reason_against_attention_tiles()
        found += [] if lacking is None else [lacking]
        instead = "PyTorch's matrix products for each document, not one pass over tiles"
    if instead and not found:
        return []
    notes = [f"model.attention: {instead}: {' and '.join(found)}"] if instead else []
    window = _window(config)
    if capped or sinks:
        why = "they are capped" if capped else "each row has a sink"
        notes.append(f"model.attention: scores are stored for each document, because {why}")
    elif window is not None and window < longest:
        notes.append(
            f"model.attention: documents of more than {window} tokens need a mask, because a layer "
            "has a sliding window"
        )
    return notes


def _head_size(config: PreTrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads


def _window(config: PreTrainedConfig) -> int | None:
    """Number of tokens that a token sees in windowed layers, including itself; None for all."""
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if "sliding_attention" in layers else None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    document_ends: Sequence[int] | None = None,
    document_tokens: torch.Tensor | None = None,
    token_places: torch.Tensor | None = None,
    **_: object,  # transformers passes on every argument of the model's forward pass
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document, called by transformers in every layer.

    Args:
        module: The attention layer.
        query: (1, heads, tokens, head size).
        key: (1, key heads, tokens, head size); each is shared by heads / key heads queries.
        value: Like `key`.
        attention_mask: None, because concatenated documents are never padded.
        dropout: Dropout probability of attention weights.
        scaling: Factor of the scores; by default 1 / sqrt(head size).
        sliding_window: Number of tokens that a token sees, including itself; None for all.
        softcap: Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
        s_aux: (heads,) score of a sink in each row, which gets weight but has no value (gpt-oss).
        cu_seq_lens_q: (documents + 1,) int32, 0 and the end of each document.
        max_length_q: Tokens of the longest document.
        document_ends: `cu_seq_lens_q` on the host; None reads the device, which synchronizes.
        document_tokens: (cu_seq_lens_q[-1],) int64, the index of each token of the documents, if
            documents share prompts: attention repeats them for each document.
        token_places: (tokens,) int64, a place of each token in `document_tokens`.

    Returns:
        (1, tokens, heads, head size), and None for the weights.

    Raises:
        FinetuneError: the model did not pass on the boundaries.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise FinetuneError(
            f"batch.padding_free: {type(module).__name__} does not pass on where documents end, so "
            "they would attend to each other; set batch.padding_free=false and batch.packing=false"
        )
    # With fp32 norms and tables under autocast, query and key are wider than the value.
    query, key, value = (each.to(compute_dtype(value)) for each in (query, key, value))
    if document_tokens is not None:
        query, key, value = (repeated(each, document_tokens) for each in (query, key, value))
    elif isinstance(document_ends, tuple) and document_ends[-1] != query.shape[2]:
        raise FinetuneError(
            f"batch.share_prompts: {type(module).__name__} does not pass on which documents share "
            "a prompt; set batch.share_prompts=false"
        )
    windowed = sliding_window is not None and sliding_window < max_length_q
    window = sliding_window if windowed else None
    # Sinks, and values of another size than keys, are computed by PyTorch.
    known = s_aux is None and query.shape[-1] == value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and not dropout and known and _has_varlen(query):
        if len(cu_seq_lens_q) == 2 and window is None and _is_faster_alone(query):
            return _causal(query, key, value, 0.0, scale, None).transpose(1, 2), None
        mixed = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
        mixed = mixed.unsqueeze(0)
    else:
        options = dropout, scale, window, softcap, s_aux, known
        given = query, key, value, cu_seq_lens_q, max_length_q, document_ends
        mixed, _ = each_document(*given, *options)
    return (mixed if token_places is None else mixed.index_select(1, token_places)), None


def _each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    document_ends: Sequence[int] | torch.Tensor | None,
    dropout: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    known: bool,
) -> tuple[torch.Tensor, None]:
    """`attend` without the variable-length kernel: by calls for one document, or for neighbors."""
    longest = 0
    if known and not dropout:
        longest = cpu.longest_served(query, max_length_q, window, softcap)
    ends = cu_seq_lens_q if document_ends is None else document_ends
    ends = ends.tolist() if isinstance(ends, torch.Tensor) else ends
    runs = _runs(ends, longest)
    # The gradient of `split` is one copy; that of a slice is as large as the sliced tensor.
    lengths = [run[-1] - run[0] for run in runs]
    heads = zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True)
    parts: list[torch.Tensor] = []
    for run, (q, k, v) in zip(runs, heads, strict=True):
        if run[1] - run[0] <= longest:
            ends = [end - run[0] for end in run]
            part = cpu.attention_of_documents(q, k, v, ends, scale, window, softcap)
        elif softcap is None and s_aux is None:
            part = _causal(q, k, v, dropout, scale, window)
        else:
            part = _eager(q, k, v, dropout, scale, window, softcap, s_aux)
        parts.append(part.transpose(1, 2))
    return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]), None


each_document = _each_document
"""Calls `_each_document`; after `leave_untraced`, outside of compiled code."""


def leave_untraced() -> None:
    """Let `torch.compile` call `_each_document` as it is: a trace would hold for one layout."""
    global each_document
    reason = "documents attend in separate calls"
    each_document = torch.compiler.disable(_each_document, reason=reason)


def _runs(ends: Sequence[int], longest: int) -> list[list[int]]:
    """Group document boundaries into calls: neighbors up to `longest` tokens, others alone."""
    runs: list[list[int]] = []
    for start, end in itertools.pairwise(ends):
        if runs and max(runs[-1][1] - runs[-1][0], end - start) <= longest:
            runs[-1].append(end)
        else:
            runs.append([start, end])
    return runs


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one document by PyTorch's kernel."""
    length = query.shape[2]
    band = _band(length, window, query.device) if window is not None and window < length else None
    shared = query.shape[1] != key.shape[1]
    if shared and _needs_whole_heads(query, band is not None):
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        shared = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=dropout,
        is_causal=band is None,
        scale=scale,
        enable_gqa=shared,
    )


def _needs_whole_heads(query: torch.Tensor, masked: bool) -> bool:
    """Whether a GPU could use only the kernel that stores all scores if key heads are shared.

    Only flash attention supports shared key heads (torch 2.13), and it needs 16 bits and no mask.
    With one key head per query head, the memory-efficient kernel supports the other cases.
    """
    if query.device.type != "cuda":
        return False
    flash = query.dtype != torch.float32 and _capability(query.device) >= VARLEN_FROM
    return masked or not flash


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one document with its scores in memory, for soft caps and sinks.

    No PyTorch kernel supports these.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = (query @ key.transpose(2, 3)) * scale  # (1, heads, length, length)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = ~_band(query.shape[2], window, query.device)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : query.shape[2]]
    return F.dropout(weights.to(query.dtype), p=dropout) @ value


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean causal mask with an optional sliding window.  # (length, length)"""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _has_varlen(query: torch.Tensor) -> bool:
    """Whether the variable-length kernel supports a query: 16 bits, on a GPU that has it."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return against_varlen(query.device, query.shape[-1]) is None


def _is_faster_alone(query: torch.Tensor) -> bool:
    """Whether PyTorch's attention of one document is faster than the variable-length kernel.

    On Hopper it is cuDNN's. For 4,096 tokens its forward and backward pass takes about half the
    time of FlashAttention 2 (H100, torch 2.11: benchmarks/results/kernels_gpu.md); `ALONE_FROM` is
    an estimate.
    """
    hopper = _capability(query.device)[0] == HOPPER
    return hopper and query.shape[2] >= ALONE_FROM and not _has_flash_3()


@functools.cache
def against_varlen(device: torch.device, head_size: int) -> str | None:
    """Why a GPU has no variable-length kernel for a head size; None if it has one."""
    if torch.version.hip is not None:
        return "the kernel has not been tested on ROCm"
    capability = _capability(device)
    if capability < VARLEN_FROM:
        return "this GPU is older than Ampere"
    if head_size > LARGEST_HEAD or head_size % 8:
        return f"the head size {head_size} is not a multiple of 8 up to {LARGEST_HEAD}"
    if 192 < head_size <= 224 and capability in SMALL_SHARED_MEMORY:
        return f"this GPU has too little shared memory for heads of {head_size}"
    return None


def use_flash_3(device: torch.device, dropped: bool) -> str | None:
    """Enable FlashAttention 3 on Hopper GPUs if it is installed; returns a note.

    PyTorch 2.13 includes version 2 and can call version 3, which does not support dropout.
    """
    if device.type != "cuda" or not _has_flash_3() or dropped or torch.version.hip is not None:
        return None
    if _capability(device)[0] != HOPPER:
        return None
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return "model.attention: uses FlashAttention 3, which is installed"


@functools.cache
def _has_flash_3() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """All documents in one variable-length flash kernel.  # (tokens, heads, head size)"""
    # Only useful in a build of PyTorch with CUDA.
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    words = varlen_words(varlen_attn, scaling, window, q.shape[1] != k.shape[1])
    mixed = varlen_attn(q, k, v, ends, ends, longest, longest, **words)
    assert isinstance(mixed, torch.Tensor)
    return mixed


def varlen_words(
    kernel: Callable[..., Any], scaling: float | None, window: int | None, shared: bool
) -> dict[str, Any]:
    """Keyword arguments for `varlen_attn`; torch 2.11 shares key heads without `enable_gqa`."""
    words = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    return words | ({"enable_gqa": shared} if _knows_sharing(kernel) else {})


@functools.cache
def _knows_sharing(kernel: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


AttentionInterface.register(DOCUMENTS, attend)
