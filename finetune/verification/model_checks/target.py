"""Turn the user's model or recipe into one that this machine runs in seconds."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune import catalog
from finetune.data.read.sources import HUB_NAME
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.recipe import Model, Recipe
from finetune.verification.proofs.small_recipe import Shape, Subject, make_subject

ROWS = 4
"""Rows of the micro-batch for comparing losses and gradients."""
SHAPE = Shape(processes=1, steps=2)


def named(word: str, overrides: list[str]) -> Recipe:
    """The recipe of a name or file, or LoRA on a model given by a folder or hub id.

    Raises:
        FinetuneError: the word is neither a recipe nor a model, or an override is wrong.
    """
    if os.path.isdir(word) and not (Path(word) / "config.json").is_file():
        raise FinetuneError(f"{word}: the folder has no config.json; name a model or a recipe")
    is_model = os.path.isdir(word) or (
        "/" in word and not Path(word).suffix and HUB_NAME.fullmatch(word) is not None
    )
    if not is_model:
        return catalog.resolve(word, overrides)
    return catalog.override(SFT(Model(word)).with_lora(), overrides)


def small(recipe: Recipe, folder: Path, cache: Path) -> Subject:
    """The recipe with its model shrunk to two layers, in a folder that transformers can load.

    Dropout of adapter and model is off, and rows have the length of a proof. Data and tokenizer are
    generated if they are not on this machine.

    Raises:
        FinetuneError: the data cannot be prepared.
    """
    if recipe.takes != "text":  # the model is checked with the loss of supervised fine-tuning
        common = {each.name: getattr(recipe, each.name) for each in dataclasses.fields(Recipe)}
        recipe = SFT(**common | {"data": (), "eval_data": ()})
    adapter = recipe.adapter
    if adapter is not None:
        recipe = dataclasses.replace(recipe, adapter=dataclasses.replace(adapter, dropout=0.0))
    subject = make_subject(recipe, SHAPE, folder, cache)
    model = subject.recipe.model
    if model.config is not None:  # from scratch: save the weights, so that both sides load the same
        model = _written(model, subject.recipe.seed, folder / "from_scratch")
    model = _without_dropout(model, folder / "without_dropout")
    return dataclasses.replace(subject, recipe=dataclasses.replace(subject.recipe, model=model))


def _written(model: Model, seed: int, home: Path) -> Model:
    fields: dict[str, Any] = dict(model.config or {})
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    network.save_pretrained(home)
    AutoTokenizer.from_pretrained(model.tokenizer).save_pretrained(home)
    return dataclasses.replace(model, name=str(home.resolve()), config=None, tokenizer=None)


def _without_dropout(model: Model, home: Path) -> Model:
    """The same model if its config has no dropout, otherwise a copy with dropout set to 0."""
    source = Path(str(model.name))
    config = source / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    quiet = _no_dropout(fields)
    if quiet == fields:
        return model
    shutil.copytree(source, home)
    (home / "config.json").write_text(json.dumps(quiet), encoding="utf-8")
    return dataclasses.replace(model, name=str(home.resolve()))


def _no_dropout(fields: dict[str, Any]) -> dict[str, Any]:
    quiet = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict):
            quiet[name] = _no_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name == "jitter_noise"):
            quiet[name] = 0.0
    return quiet


def described(folder: str) -> str:
    """Description of the shrunk model in a folder, in one line."""
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    return (
        f"{config.model_type}, {text.num_hidden_layers} layers of width {text.hidden_size}, random "
        "weights, fp32"
    )
