"""Match the tables of a model with the tokens of its tokenizer, and extend both.

A token has an id, and the tables of the model (embedding and head) have a row for each id. Either
may be larger: spare rows are harmless, but a token without a row cannot be looked up.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import AddedToken, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.errors import FinetuneError, refuse
from finetune.models.load_checks import token_rows
from finetune.recipe import LoRA, Recipe

MOST_NAMED = 10
"""Maximum number of tokens that a message names."""


def set_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> None:
    """Give a tokenizer other special tokens, by their names in transformers.

    Raises:
        FinetuneError: a token is not in the vocabulary.
    """
    known = tokenizer.get_vocab()
    if missing := [f"{name}={token}" for name, token in tokens.items() if token not in known]:
        raise FinetuneError(
            f"model.special_tokens: {', '.join(missing)} is not in the vocabulary of the "
            "tokenizer; add it with model.add_tokens"
        )
    for name, token in tokens.items():
        setattr(tokenizer, name, token)


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add the tokens that a tokenizer lacks; they match a text without normalization."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in tokens if t not in known])


def check_words(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer if it can encode a text.

    From a folder with only `config.json`, transformers 5.23 builds a tokenizer with an empty
    vocabulary, which encodes every text as no tokens.

    Raises:
        ValueError: it has no tokens except added ones.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        raise ValueError("the vocabulary is empty: its files are missing")
    tokenizer.decode(tokenizer("a")["input_ids"])  # raises for settings of a wrong type
    return tokenizer


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of table rows that all tokens of a tokenizer need."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def pad_id(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> int:
    """Token id for padding: the tokenizer's pad token, or 0 if that has no row in the model.

    Padding is masked by its position, never by its id, so any token with a row can be used.
    """
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) and 0 <= pad < (rows or pad + 1) else 0


def replace_pad(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> str | None:
    """Replace a pad token without a row in the model; returns a note if it is replaced.

    Any library can then pad rows for the saved model and tokenizer.
    """
    pad = tokenizer.pad_token_id
    if rows is None or not isinstance(pad, int) or pad < rows:
        return None
    named = tokenizer.pad_token
    usable = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
    other = next(each for each in usable if isinstance(each, int) and each < rows)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(other)
    return (
        f"the pad token {named} ({pad}) has no row in the model, which has {rows}: rows are padded "
        f"with {tokenizer.pad_token}, which is masked, and the tokenizer is saved with that"
    )


def without_lost_pad(config: PreTrainedConfig) -> dict[str, None]:
    """Overrides for a configuration whose pad token has no row, because torch refuses such a table.

    For `from_pretrained(..., **overrides)`; empty if the pad token has a row.
    """
    text = config.get_text_config()
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if text is config and isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        return {"pad_token_id": None}
    return {}


def refuse_tokens_without_rows(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int | None, highest: int
) -> None:
    """Refuse data with tokens that have no row in the model.

    Raises:
        FinetuneError: with the tokens, and how to add rows for them.
    """
    if rows is None or highest < rows:
        return
    named = recipe.model.tokenizer or recipe.model.adapter or recipe.model.name
    lost = sorted((id, token) for token, id in tokenizer.get_vocab().items() if id >= rows)
    prefix = f"model.tokenizer: '{named}' gave the token {highest}, but the model has {rows}"
    if len(lost) > MOST_NAMED:
        raise FinetuneError(
            f"{prefix}; {len(lost)} of its tokens have no row: name the tokenizer that belongs to "
            "it"
        )
    words = ", ".join(f'"{token}"' for _, token in lost)
    raise FinetuneError(
        f"{prefix}; tokens without a row: {words}; add rows with model.add_tokens=[{words}], or "
        "name the tokenizer that belongs to the model"
    )


# --- tables ------------------------------------------------------------------------------------


def grow(model: PreTrainedModel, rows: int) -> None:
    """Grow embedding and head to `rows` rows; each new row is the mean of the old ones.

    Tied tables stay tied, and the configuration gets the new size.
    """
    old = token_rows(model)
    if old is None or rows <= old:
        return
    means = [table.mean(0, dtype=torch.float32) for table in _weights(model)]
    with torch.no_grad():
        model.resize_token_embeddings(rows, mean_resizing=False)
        for table, mean in zip(_weights(model), means, strict=True):
            table[old:] = mean.to(table.dtype)
    found = token_rows(model)
    if found != rows:
        raise FinetuneError(
            f"model.add_tokens: transformers gave {type(model).__name__} {found} rows instead of "
            f"{rows}; tokens cannot be added to it"
        )


def rows_of_adapter(
    model: PreTrainedModel, config: PeftConfig, stored: dict[str, list[int]]
) -> int:
    """Number of table rows that an adapter needs, as far as its file shows; else 0.

    Args:
        model: Base model.
        config: PEFT's configuration of the adapter.
        stored: Shape of each tensor in its file.
    """
    table: Any = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    places = (f"base_model.model.{name}.{end}" for end in ("weight", "base_layer.weight"))
    rows = [stored[key][0] for key in places if key in stored]
    given = (config.trainable_token_indices or {}) if isinstance(config, LoraConfig) else {}
    for ids in given.values() if isinstance(given, dict) else (given,):
        rows += [max(ids, default=-1) + 1]
    return max(rows, default=0)


@torch.no_grad()
def _weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Tensors with a row for each token: the embedding, an untied head, the head's bias."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    found = [embedding.weight.data]
    if head is not None and head.weight is not embedding.weight:
        found.append(head.weight.data)
    if head is not None and getattr(head, "bias", None) is not None:
        found.append(head.bias.data)
    return found


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """Embedding and head by their full names; only the embedding if they are tied."""
    found: dict[str, nn.Module] = {}
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    for table in (embedding, head):
        if table is None or (table is head and found and head.weight is embedding.weight):
            continue
        found[next(name for name, module in model.named_modules() if module is table)] = table
    return found


def add_rows(model: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> range:
    """Add table rows for the tokens that a recipe adds; returns the new rows.

    Raises:
        FinetuneError: these rows would not be trained.
    """
    old = token_rows(model) or 0
    if recipe.model.adapter is not None:
        refuse_more_tokens(recipe, tokenizer, old)
        return range(0)
    if recipe.model.add_tokens:
        grow(model, rows_needed(tokenizer))
    grown = range(old, token_rows(model) or 0)
    refuse_untrained(model, recipe, tokenizer, grown)
    return grown


# --- which rows are trained --------------------------------------------------------------------


def token_indices(
    model: nn.Module, adapter: LoRA, tokenizer: PreTrainedTokenizerBase, grown: range
) -> dict[str, list[int]] | None:
    """`adapter.trainable_token_indices` in PEFT's form: ids by the full name of each table.

    New rows of a table (`grown`) are always included: code that loads the result would otherwise
    fill them with other values.

    Raises:
        FinetuneError: a token is unknown or has no row, or a table cannot be trained by rows.
    """
    given = adapter.trainable_token_indices
    if not given:
        return None
    known = tables(model)
    named = given if isinstance(given, dict) else dict.fromkeys(known, given)
    problems: list[str] = []
    found: dict[str, list[int]] = {}
    for name, tokens in named.items():
        table: Any = known.get(name) or next(
            (module for full, module in model.named_modules() if full.endswith(name)), None
        )
        if table is None:
            problems.append(f"no module is named '{name}'; tables here: {', '.join(known)}")
            continue
        if getattr(table, "bias", None) is not None:
            problems.append(
                f"the head '{name}' has a bias, which PEFT ignores if rows are trained; use "
                "adapter.modules_to_save"
            )
        ids = set(grown)
        for token in tokens:
            id = token if isinstance(token, int) else tokenizer.get_vocab().get(token)
            if id is None:
                problems.append(
                    f"the tokenizer has no token '{token}'; add it with model.add_tokens"
                )
            elif not 0 <= id < table.weight.shape[0]:
                problems.append(
                    f"token {token!r} has no row in '{name}', which has {table.weight.shape[0]}"
                )
            else:
                ids.add(id)
        found[name] = sorted(ids)
    refuse(dict.fromkeys(f"adapter.trainable_token_indices: {each}" for each in problems))
    return found


def refuse_untrained(
    model: nn.Module, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, grown: range
) -> None:
    """Refuse added tokens whose rows an adapter would not train.

    Raises:
        FinetuneError: with the fields that train them.
    """
    adapter, added = recipe.adapter, recipe.model.add_tokens
    if adapter is None or not added:
        return
    vocabulary = tokenizer.get_vocab()
    wanted = {vocabulary[token] for token in added if vocabulary.get(token) in grown}
    chosen = token_indices(model, adapter, tokenizer, range(0)) or {}
    for name in tables(model) if wanted else ():
        whole = any(name == each or name.endswith(f".{each}") for each in adapter.modules_to_save)
        left = sorted(wanted - set(chosen.get(name, ())))
        if not whole and left:
            words = ", ".join(f'"{tokenizer.convert_ids_to_tokens(id)}"' for id in left)
            given = adapter.trainable_token_indices
            others = () if isinstance(given, dict) else given
            raise FinetuneError(untrained(words, name, tuple(tables(model)), others))


def refuse_more_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Refuse tokens that the starting adapter (`model.adapter`) has no rows for.

    Raises:
        FinetuneError: with these tokens.
    """
    known = tokenizer.get_vocab()
    lost = [token for token in recipe.model.add_tokens if known[token] >= rows]
    if lost:
        raise FinetuneError(
            f"model.add_tokens: the adapter of model.adapter has no rows for {', '.join(lost)}; "
            "merge it into its base (finetune export RUN --merge --to FOLDER), and add tokens to "
            "the result"
        )


def untrained(
    words: str, table: str, names: tuple[str, ...], given: Sequence[str | int] = ()
) -> str:
    """The error message for rows that would not be trained; `given` are those that are."""
    listed = ", ".join([*(json.dumps(each, ensure_ascii=False) for each in given), words])
    saved = ", ".join(name.rsplit(".", 1)[-1] for name in names)
    return (
        f"model.add_tokens: the adapter does not train the rows of {words} in {table}, which would "
        f"stay the mean of the others; set adapter.trainable_token_indices=[{listed}] to train "
        f"these rows, adapter.modules_to_save=[{saved}] to train all rows, or adapter=null"
    )
