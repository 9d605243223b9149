"""The reference model of a method: the initial model, the base, or another model."""

from finetune.recipe import Model, Recipe

START, BASE = "start", "base"
"""The model at the start of training, and the same model without an adapter."""


def reference_of(recipe: Recipe) -> str:
    """`start`, `base` or the name of a model; `start` for a method without this field."""
    return getattr(recipe, "reference", START)


def other_model(recipe: Recipe) -> Model | None:
    """The model that a recipe names as its reference; None if it needs no other model.

    It uses the quantization and attention of the trained model.
    """
    name, own = reference_of(recipe), recipe.model
    if name in (START, BASE) or not (recipe.reads_reference or recipe.needs_second_model):
        return None
    return Model(name=name, quantization=own.quantization, attention=own.attention)


def second_model(recipe: Recipe) -> Model | None:
    """The frozen reference model that a process holds, for one pass or for the complete run.

    None if the trained model serves as its own reference.
    """
    return other_model(recipe) or (recipe.model if recipe.needs_second_model else None)
