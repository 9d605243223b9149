"""The head of a model: its class in transformers, a new head's values, and the pad token."""

import zlib
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.checkpoints.stop_tokens import network_of
from finetune.data.rows.store import Documents
from finetune.errors import FinetuneError
from finetune.models.load_checks import token_rows
from finetune.models.vocabulary import pad_id, refuse_tokens_without_rows, replace_pad
from finetune.recipe import Head, Recipe

HEAD = "score"
"""Name of the score head of a decoder in transformers."""


def auto_class(
    head: Head, reads: tuple[str, ...] = (), config: PreTrainedConfig | None = None
) -> Any:
    """The transformers class for a model with a score head, or for a language model.

    Args:
        head: Head of the recipe.
        reads: Its `model.reads`: a model that reads images is loaded with its tower.
        config: Config of a model that may have no class for text alone.
    """
    if head.scored:
        return AutoModelForSequenceClassification
    kind, both = type(config), MODEL_FOR_CAUSAL_LM_MAPPING
    if reads or (kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in both):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The language model head or the score head of a model."""
    head: Any = model.get_output_embeddings()
    return getattr(model, HEAD, None) if head is None else head


def without_new_head(info: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Loading info without a missing score head, and whether that head is missing."""
    missing = {key for key in info["missing_keys"] if key != f"{HEAD}.weight"}
    return {**info, "missing_keys": missing}, len(missing) < len(info["missing_keys"])


def draw_head(model: PreTrainedModel, chosen: Head, seed: int) -> None:
    """Give a model a new score head with normally distributed weights; no-op for a language model.

    They are drawn from a separate generator, so that all engines agree.
    """
    if not chosen.scored:
        return
    config: Any = model.config.get_text_config()
    table: Any = model.get_input_embeddings()
    head = nn.Linear(config.hidden_size, len(chosen.names), bias=False)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(HEAD.encode()))
    deviation = getattr(config, "initializer_range", None) or 0.02
    with torch.no_grad():
        head.weight.normal_(0, deviation, generator=generator)
    setattr(model, HEAD, head.to(table.weight.device, model.dtype))


def refuse_other_head(model: PreTrainedModel, chosen: Head) -> None:
    """Refuse a model whose score head is not a plain linear layer named `HEAD`.

    Raises:
        FinetuneError: with the class of the model.
    """
    own = getattr(model, HEAD, None)
    if chosen.scored and (not isinstance(own, nn.Linear) or own.bias is not None):
        raise FinetuneError(
            f"model: {type(model).__name__} has no linear layer '{HEAD}' that reads the last "
            "token; use a decoder such as Qwen3, Llama, Mistral or Gemma"
        )


def fit_tokens(
    recipe: Recipe, network: nn.Module, tokenizer: PreTrainedTokenizerBase, documents: Documents
) -> tuple[int, list[str]]:
    """The id for padding rows, and notes on the pad token that is saved with the result.

    Raises:
        FinetuneError: the data has tokens without a row in the model's embedding.
    """
    rows = token_rows(network)
    refuse_tokens_without_rows(recipe, tokenizer, rows, int(documents.ids.max()))
    note = replace_pad(tokenizer, rows)
    pad = pad_id(tokenizer, rows)
    if recipe.head.scored:
        note = set_pad_token(network_of(network), tokenizer, documents) or note
    return pad, [] if note is None else [note]


def set_pad_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Documents
) -> str | None:
    """Set a pad token that ends no sequence, in the model and the tokenizer; returns a note.

    transformers 5.23 reads the score at the last token that is not the pad token: for a sequence
    that ends with the pad token, it reads one token too early.

    Args:
        model: Model whose config.json is saved.
        tokenizer: Tokenizer that is saved with it.
        documents: All documents that are scored.
    """
    ends = set(np.unique(documents.ids[documents.offsets[1:] - 1]).tolist())
    own, rows = tokenizer.pad_token_id, token_rows(model) or len(tokenizer)
    known = (own, tokenizer.unk_token_id, tokenizer.bos_token_id)
    safe = [each for each in known if isinstance(each, int) and each < rows and each not in ends]
    chosen = safe[0] if safe else None
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = chosen
    if chosen is None:
        return (
            "config.json has no pad token, because every candidate ends some sequence: "
            "transformers scores one sequence at a time, until pad_token_id names another token"
        )
    if chosen == own:
        return None
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chosen)
    return (
        f"the result is padded with {tokenizer.pad_token} ({chosen}): transformers reads a score "
        "before the pad token, so no sequence may end with that token"
    )
