"""The frozen reference model that trains beside the policy."""

import copy

from torch import nn

from finetune.distributed.base import Engine
from finetune.models.model import build, frozen
from finetune.recipe.references import other_model


def second_model(engine: Engine, network: nn.Module) -> nn.Module | None:
    """The frozen reference model if the loss needs one: another model, or a copy of the start.

    None if the base under a new adapter is the reference: it is the model with its adapter off.
    """
    recipe = engine.plan.recipe
    if not recipe.needs_second_model:
        return None
    other = other_model(recipe)
    if other is not None:
        return frozen(engine, other)
    # A copy of a divided module would call the layers of the original.
    divided = engine.plan.backend.axes.any
    start = build(engine, recipe.seed) if divided else copy.deepcopy(network)
    return start.requires_grad_(False).eval().to(engine.device)
