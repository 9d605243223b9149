"""Take the result of a finished run as the model that a recipe starts from.

This module does not import torch, so a run that cannot be a start is refused quickly.
"""

import dataclasses
import json
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.recipe import Recipe
from finetune.runs.run import Run


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with the result of the run that `model.name` names; other names are unchanged.

    A run that trained all weights is replaced by its model, and one that trained an adapter by its
    base and `model.adapter`, if the recipe trains an adapter.

    Raises:
        FinetuneError: the run has no result, or has an adapter and the recipe trains all weights.
    """
    model = recipe.model
    if model.name is None:
        return recipe
    run = Run(Path(model.name))
    if not run.recipe.is_file() or (run.root / "config.json").is_file():
        return recipe
    if (run.final / "config.json").is_file():
        return dataclasses.replace(recipe, model=dataclasses.replace(model, name=str(run.final)))
    if not (run.final / "adapter_config.json").is_file():
        raise FinetuneError(
            f"model.name: {model.name} is a run without a result; finish it with --resume, or name "
            "a folder of its checkpoints"
        )
    base = _base_of(run)
    train_further = f"set model.name={base} model.adapter={model.name}"
    if model.adapter is not None:
        raise FinetuneError(
            f"model.name: {model.name} is a run with an adapter, and model.adapter names another "
            f"one; {train_further}"
        )
    if recipe.adapter is None:
        raise FinetuneError(
            f"model.name: {model.name} is a run with an adapter, but the recipe trains all "
            f"weights; to train its adapter further, {train_further}; else merge it first: "
            f"finetune export {model.name} --merge --to FOLDER"
        )
    started = dataclasses.replace(model, name=base, adapter=model.name)
    return dataclasses.replace(recipe, model=started)


def _base_of(run: Run) -> str:
    """The base of the adapter that a run trained, as its recipe names it."""
    try:
        return str(json.loads(run.recipe.read_text(encoding="utf-8"))["model"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FinetuneError(
            f"model.name: {run.recipe} cannot be read: {type(error).__name__}: {error}"
        ) from None
