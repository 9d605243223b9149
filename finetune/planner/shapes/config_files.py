"""A model's `config.json`: where it may be on this machine, and what it says of the head."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from finetune.cache import hub_cache
from finetune.errors import FinetuneError
from finetune.planner.families import family_of
from finetune.planner.shapes import published
from finetune.recipe import Recipe, Scores


def config_paths(name: str, revision: str | None) -> list[Path]:
    """Possible paths: in a local folder, and in the hub cache."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    return [Path(name) / "config.json", folder / "snapshots" / commit / "config.json"]


def model_fields(recipe: Recipe) -> dict[str, Any]:
    """The config of a recipe's model; empty if it is not on this machine."""
    model = recipe.model
    if model.config is not None:
        return dict(model.config)
    if model.name is None:
        return {}
    for path in config_paths(model.name, model.revision):
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                return {}  # loading the model reports the error
            return cast(dict[str, Any], found) if isinstance(found, dict) else {}
    return {}


def fields_of(recipe: Recipe) -> Mapping[str, Any]:
    """`model_fields`, or the fields in the table of published shapes; empty if not known."""
    found = model_fields(recipe)
    return found or (published.find(recipe.model.name) if recipe.model.name else None) or {}


def known_fields(recipe: Recipe) -> Mapping[str, Any]:
    """`fields_of` for the model that is loaded: of some multimodal types, the language model."""
    fields = fields_of(recipe)
    alone = family_of(fields).text_only and "text_config" in fields
    return fields["text_config"] if alone else fields


def has_score_head(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a sequence classification model."""
    names = fields.get("architectures")
    named = cast(list[Any], names) if isinstance(names, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in named)


def refuse_other_labels(fields: Mapping[str, Any], scores: Scores, what: str) -> None:
    """Refuse a score head for another number of labels, or for the same ones in another order.

    Args:
        fields: A `config.json`; one without a score head or labels is accepted.
        scores: Score head of the recipe.
        what: Field and name of the model or adapter, for messages.

    Raises:
        FinetuneError: with the labels of the model and of the recipe.
    """
    named = fields.get("id2label")
    if not has_score_head(fields) or not isinstance(named, Mapping):
        return
    labels = cast(Mapping[Any, Any], named)
    if not all(str(number).isdecimal() for number in labels):
        return  # transformers reports it
    found, wanted = [str(labels[n]) for n in sorted(labels, key=int)], list(scores.names)
    if len(found) != len(wanted):
        raise FinetuneError(
            f"{what} has a score head for {len(found)} labels ({_listed(found)}), and the recipe "
            f"has {len(wanted)} ({_listed(wanted)}); name the model that it was trained from, "
            "which gets a new head"
        )
    if sorted(found) == sorted(wanted) and found != wanted:
        raise FinetuneError(
            f"{what} has a score head for the labels in the order {_listed(found)}, and the recipe "
            f"has {_listed(wanted)}; set labels to that order"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
