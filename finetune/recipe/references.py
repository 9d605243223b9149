"""Which reference a method holds its policy to: the start, the base, or another model."""

from finetune.recipe import Model, Recipe

START, BASE = "start", "base"
"""The model as training starts, and the same without any adapter."""


def reference_of(recipe: Recipe) -> str:
    """`start`, `base` or the name of a model; `start` for a method that has no such field."""
    return getattr(recipe, "reference", START)


def other_model(recipe: Recipe) -> Model | None:
    """The model that a recipe names as the reference; None where it needs no other one.

    Its weights are stored as those of the model that is trained.
    """
    name, own = reference_of(recipe), recipe.model
    if name in (START, BASE) or not (recipe.reads_reference or recipe.needs_second_model):
        return None
    return Model(name=name, quantization=own.quantization, attention=own.attention)


def second_model(recipe: Recipe) -> Model | None:
    """The frozen model that a process holds as the reference, for a pass or throughout.

    None where the model that is trained gives its own reference.
    """
    return other_model(recipe) or (recipe.model if recipe.needs_second_model else None)
