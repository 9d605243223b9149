"""Prepare a result for other libraries and servers: stop tokens, configs, templates, file modes.

What they read, according to their source code:

    transformers 5.23, vLLM, SGLang   `eos_token_id` of generation_config.json, a number or a list
    vLLM, TGI, most scripts           the tokenizer's `eos_token` as well
    llama.cpp's converter             `eos_token` of tokenizer_config.json before the `eos_token_id`
                                      of config.json, where it does not read lists
    PEFT 0.21                         only the files of the base, not those next to an adapter

A result therefore has every trained end token in both JSON files, and the end of a turn as the
tokenizer's `eos_token`.
"""

import contextlib
import copy
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.data.chat.render import Chat
from finetune.data.rows.store import Rows
from finetune.errors import FinetuneError
from finetune.recipe import Model

SAMPLED = 4096
"""Documents checked for their last trained token, evenly spaced."""

GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")

PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)
"""Conversations that must render the same before and after the tokenizer is changed."""


# --- stop tokens -------------------------------------------------------------------------------


def turn_end(chat: Chat) -> int | None:
    """Token id that ends an assistant turn of the chat template; None without a usable template."""
    if chat.template is None:
        return None
    eos = chat.tokenizer.eos_token_id
    try:
        ends = chat.stop_ids
    except FinetuneError:  # a template that the data does not use may be invalid
        return None
    others = [token for token in ends if token != eos]
    return others[0] if others else eos


def trained_ends(rows: Rows, chat: Chat) -> tuple[int, ...]:
    """End tokens that end the trained part of documents, most frequent first."""
    members = np.unique(rows.members)
    step = max(1, len(members) // SAMPLED)
    counts: dict[int, int] = {}
    for number in members[::step]:
        ids, trained = rows.documents.document(int(number))
        said = np.flatnonzero(trained)
        if len(said):
            last = int(ids[said[-1]])
            counts[last] = counts.get(last, 0) + 1
    rows.documents.release()
    closing = [token for token in counts if token in chat.end_tokens]
    return tuple(sorted(closing, key=lambda token: (-counts[token], token)))


def all_ends(*ends: int | Iterable[int] | None) -> list[int]:
    """Unique token ids from several sources, ascending.

    Raises:
        FinetuneError: an id, which may come from a file of the model, is not an integer.
    """
    found: set[int] = set()
    for each in ends:
        given = [] if each is None else [each] if not isinstance(each, Iterable) else list(each)
        if not all(type(token) is int for token in given):
            raise FinetuneError(f"generation_config.json: eos_token_id: got {each!r}, expected ids")
        found.update(given)
    return sorted(found)


def generation_config(
    own: GenerationConfig | None, ends: Iterable[int], pad: int | None
) -> GenerationConfig:
    """A model's own generation config with every end token of an answer, valid for saving.

    Args:
        own: The generation config of the base model.
        ends: Token ids that end an answer, in addition to those of `own`.
        pad: The tokenizer's pad token id; None keeps the one of `own`.
    """
    config = copy.deepcopy(own) if own is not None else GenerationConfig()
    config.eos_token_id = all_ends(config.eos_token_id, ends) or None
    if pad is not None:
        config.pad_token_id = pad
    if config.use_cache is False:
        config.use_cache = True
    try:
        config.validate(strict=True)
    except ValueError:
        # Some models have a temperature without `do_sample`, which transformers refuses to save.
        config.do_sample = True
    return config


def network_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model, or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner


def set_stop_tokens(model: nn.Module, chat: Chat, rows: Rows) -> PreTrainedTokenizerBase:
    """Set the stop tokens of a model to the ends of its training data.

    Args:
        model: Its generation config is replaced by that of the result.
        chat: The chat template that rendered the rows.
        rows: The training data.

    Returns:
        The tokenizer of the result.
    """
    trained, end = trained_ends(rows, chat), turn_end(chat)
    ends = all_ends(trained, end, chat.tokenizer.eos_token_id)
    network: Any = network_of(model)
    network.generation_config = (
        generation_config(network.generation_config, ends, chat.tokenizer.pad_token_id)
        if network.can_generate()
        else None
    )
    return saved_tokenizer(chat.tokenizer, end if end in trained else None)


# --- config.json -------------------------------------------------------------------------------


def saved_config(network: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedConfig:
    """The config of a trained model as servers need it: stop tokens, cache, class and dtype."""
    config = copy.deepcopy(network.config)
    generation = network.generation_config
    ends = generation.eos_token_id if generation is not None else None
    if isinstance(ends, list) and len(ends) == 1:
        ends = ends[0]
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        part.use_cache = True
        if ends is not None:
            part.eos_token_id = ends
    config.architectures = [type(network).__name__.removeprefix("FSDP")]
    if dtype is not None:
        config.dtype = dtype
    return config


def base_reference(model: Model) -> tuple[str, str | None]:
    """Name and revision with which another machine finds the base of an adapter.

    A folder of the hub's cache becomes its repository and commit; any other folder its path.
    """
    name, revision = str(model.name), model.revision
    if not os.path.isdir(name):
        return name, revision
    path = Path(name).resolve()
    cached = re.search(r"/models--([^/]+?)(?:--([^/]+))?/snapshots/([0-9a-f]{7,40})$", str(path))
    if cached is None:
        return str(path), revision
    owner, repository, commit = cached.groups()
    return (f"{owner}/{repository}" if repository else owner), commit


# --- tokenizer ---------------------------------------------------------------------------------


def saved_tokenizer(tokenizer: PreTrainedTokenizerBase, end: int | None) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer for the result: no training tags, and `end` as its `eos_token`.

    The `eos_token` is left unchanged if `end` would change what the template renders, or the ids
    of a text.
    """
    saved = copy.deepcopy(tokenizer)
    if isinstance(saved.chat_template, dict):
        saved.chat_template = {
            name: without_generation_tags(each) for name, each in saved.chat_template.items()
        }
    elif saved.chat_template is not None:
        saved.chat_template = without_generation_tags(saved.chat_template)
    if end is None or end == saved.eos_token_id:
        return saved
    changed = copy.deepcopy(saved)
    changed.eos_token = str(saved.convert_ids_to_tokens(end))
    alike = _renderings(saved) == _renderings(changed)
    return changed if alike and saved("a")["input_ids"] == changed("a")["input_ids"] else saved


def without_generation_tags(template: str) -> str:
    """A template without `{% generation %}`, which only training needs and some servers refuse.

    Each tag becomes an empty comment with the same whitespace control, so every text is unchanged.
    """
    return GENERATION_TAG.sub(r"{#\1 \2#}", template)


def _renderings(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    texts: list[Any] = []
    if tokenizer.chat_template is None:
        return texts
    for messages in PROBES:
        for header in (False, True):
            try:
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=header
                )
            except Exception as error:  # a template can raise anything
                text = type(error).__name__
            texts.append(text)
    return texts


# --- files -------------------------------------------------------------------------------------


def follow_umask(folder: Path) -> None:
    """Set the files of a folder to the mode that the umask gives to new files.

    safetensors (0.8) writes files that only their owner can read.
    """
    probe = Path(tempfile.mkdtemp(dir=folder)) / "probe"
    try:
        probe.touch()
        mode = probe.stat().st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)
        probe.parent.rmdir()
    for path in _files(folder):
        if path.stat().st_mode & 0o777 != mode:
            with contextlib.suppress(OSError):  # file systems without modes
                path.chmod(mode)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
