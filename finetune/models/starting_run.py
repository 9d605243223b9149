"""Take the results of finished runs as models: the start, the teacher and the reference.

This module does not import torch, so a run that cannot be a start is refused quickly.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.methods.distill import Distill
from finetune.recipe import Recipe
from finetune.recipe.references import other_model
from finetune.runs.run import Run

SCORING = ("reward", "classifier")
"""Methods that train a score head in place of a language-model head."""


def resolved(recipe: Recipe) -> Recipe:
    """model.name, teacher.name, reference: a run without a fitting result; finish or merge it.

    A run that trained all weights is replaced by its model, and one that trained an adapter by its
    base and `model.adapter`, if the recipe trains an adapter. A run that `teacher.name` or
    `reference` names is replaced by its model. Other names are unchanged.

    Raises:
        FinetuneError: a run has no result, or has an adapter where a complete model is needed.
    """
    recipe = _others_resolved(recipe)
    model, instead = recipe.model, "a folder of its checkpoints"
    run = model.name and _run_of("model.name", model.name, instead, recipe.head.scored)
    if not run:
        return recipe
    if _is_model(run.final):
        return dataclasses.replace(recipe, model=dataclasses.replace(model, name=str(run.final)))
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


def _run_of(field: str, name: str, instead: str, scores: bool = False) -> Run | None:
    """The run that a name is, with its result; None for the name of a model.

    Raises:
        FinetuneError: it has no result, or a score head that the recipe does not train (`scores`).
    """
    run = Run(Path(name))
    if not run.recipe.is_file() or (run.root / "config.json").is_file():
        return None
    if not scores:
        _refuse_scores(field, run)
    if not _is_model(run.final) and not (run.final / "adapter_config.json").is_file():
        raise FinetuneError(
            f"{field}: {name} is a run without a result; finish it with --resume, or name {instead}"
        )
    return run


def _others_resolved(recipe: Recipe) -> Recipe:
    """The recipe with the results of the runs that its teacher and its reference name."""
    changes, teacher, other = dict[str, Any](), recipe.taught_by, other_model(recipe)
    if isinstance(recipe, Distill) and recipe.teacher is not None and teacher is not None:
        name = _model_of("teacher.name", str(teacher.name))
        changes["teacher"] = dataclasses.replace(recipe.teacher, name=name)
    if other is not None:
        changes["reference"] = _model_of("reference", str(other.name))
    return dataclasses.replace(recipe, **changes) if changes else recipe


def _model_of(field: str, name: str) -> str:
    """The folder of the model that a run trained; a name that is not a run is unchanged."""
    run = _run_of(field, name, "a complete model")
    if run is not None and not _is_model(run.final):
        raise FinetuneError(
            f"{field}: {name} is a run with an adapter, expected a complete model; merge it "
            f"first: finetune export {name} --merge --to FOLDER"
        )
    return name if run is None else str(run.final)


def _refuse_scores(field: str, run: Run) -> None:
    """Refuse the run of a reward model or classifier where a language model is needed."""
    method = _fields_of(run).get("method")
    if method in SCORING:
        raise FinetuneError(
            f"{field}: {run.root} is a run of method '{method}', whose result has a score head and "
            f"no language-model head; name a run of another method, or the model that it was "
            f"trained from: {_base_of(run)}"
        )


def _is_model(folder: Path) -> bool:
    """Whether a folder has a complete model; an adapter with a score head has a config too."""
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()


def _base_of(run: Run) -> str:
    """The model that a run was trained from, as its recipe names it."""
    try:
        return str(_fields_of(run)["model"]["name"])
    except (KeyError, TypeError) as error:
        raise _unreadable(run, error) from None


def _fields_of(run: Run) -> dict[str, Any]:
    try:
        return dict(json.loads(run.recipe.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(run, error) from None


def _unreadable(run: Run, error: Exception) -> FinetuneError:
    return FinetuneError(
        f"model.name: {run.recipe} cannot be read: {type(error).__name__}: {error}"
    )
