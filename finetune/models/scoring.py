"""Models with a score head: their class, the head's first values, and what fills their rows."""

import zlib
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.checkpoints.handover import network_of
from finetune.data.store import Documents
from finetune.errors import FinetuneError
from finetune.models.load_checks import token_rows
from finetune.models.vocabulary import pad_id, refuse_tokens_without_rows, replace_pad
from finetune.recipe import Recipe, Scores

HEAD = "score"
"""Name that transformers gives to the head of a decoder that scores."""


def auto_class(scores: Scores | None) -> Any:
    """The class of transformers that builds a model with such a head, or a language model."""
    return AutoModelForCausalLM if scores is None else AutoModelForSequenceClassification


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The head that predicts tokens, or the one that scores."""
    head: Any = model.get_output_embeddings()
    return getattr(model, HEAD, None) if head is None else head


def without_new_head(info: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """What loading said, without a score head that the files do not have; whether it is new."""
    missing = {key for key in info["missing_keys"] if key != f"{HEAD}.weight"}
    return {**info, "missing_keys": missing}, len(missing) < len(info["missing_keys"])


def draw_head(model: PreTrainedModel, scores: Scores, seed: int) -> None:
    """Give a model a new score head: normal, from a generator of its own, so that engines agree.

    Raises:
        FinetuneError: the model has no such head.
    """
    config: Any = model.config.get_text_config()
    table: Any = model.get_input_embeddings()
    head = nn.Linear(config.hidden_size, len(scores.names), bias=False)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(HEAD.encode()))
    deviation = getattr(config, "initializer_range", None) or 0.02
    with torch.no_grad():
        head.weight.normal_(0, deviation, generator=generator)
    setattr(model, HEAD, head.to(table.weight.device, model.dtype))


def refuse_other_head(model: PreTrainedModel) -> None:
    """Refuse a model whose scores are not read by a plain linear layer of that name.

    Raises:
        FinetuneError: with the class of the model.
    """
    if not isinstance(getattr(model, HEAD, None), nn.Linear) or model.score.bias is not None:
        raise FinetuneError(
            f"model: {type(model).__name__} has no linear layer '{HEAD}' that reads the last "
            "token; use a decoder such as Qwen3, Llama, Mistral or Gemma"
        )


def fit_tokens(
    recipe: Recipe, network: nn.Module, tokenizer: PreTrainedTokenizerBase, documents: Documents
) -> tuple[int, list[str]]:
    """The token that fills rows, and notes of the one that is saved with the result.

    Raises:
        FinetuneError: the data has tokens without a row in the model, whose lookup would fail.
    """
    rows = token_rows(network)
    refuse_tokens_without_rows(recipe, tokenizer, rows, int(documents.ids.max()))
    note = replace_pad(tokenizer, rows)
    pad = pad_id(tokenizer, rows)
    if recipe.scores is not None:
        note = settle_pad(network_of(network), tokenizer, documents) or note
    return pad, [] if note is None else [note]


def settle_pad(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Documents
) -> str | None:
    """Give model and tokenizer a pad token in which no sequence ends; returns a note.

    transformers 5.23 reads the score at the last token that is not the pad token: where a sequence
    ends in that token, it reads one token too early.

    Args:
        model: whose config.json is saved.
        tokenizer: that is saved beside it.
        documents: all that is scored.
    """
    ends = set(np.unique(documents.ids[documents.offsets[1:] - 1]).tolist())
    own, rows = tokenizer.pad_token_id, token_rows(model) or len(tokenizer)
    known = (own, tokenizer.unk_token_id, tokenizer.bos_token_id)
    safe = [each for each in known if isinstance(each, int) and each < rows and each not in ends]
    chosen = safe[0] if safe else None
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = chosen
    if chosen is None:
        return (
            "config.json has no pad token, because every candidate is one in which a sequence "
            "ends: transformers scores one sequence at a time, until pad_token_id names another"
        )
    if chosen == own:
        return None
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chosen)
    return (
        f"the result is padded with {tokenizer.pad_token} ({chosen}): transformers reads a score "
        "before the pad token, which must not be one in which a sequence ends"
    )
