"""Checks of a loaded model, before and after an engine has wrapped it."""

import torch

from finetune.data.audit import MEANT, beyond_context
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.models import load_checks, soundness
from finetune.recipe import Recipe


def context(recipe: Recipe, network: torch.nn.Module, data: Prepared) -> list[str]:
    """data, max_completion_length: longer than the model's context; use fewer tokens.

    Returns:
        Notes, if `data_checks` allows such rows.

    Raises:
        FinetuneError: it does not, the position embeddings are learned, or completions alone
            exceed the context.
    """
    longest = load_checks.context_length(network.config)
    if longest is None:
        return []
    if recipe.completion_length >= longest:
        raise FinetuneError(
            f"max_completion_length: {recipe.completion_length:,} tokens leave none of the model's "
            f"context of {longest:,} for a prompt; use fewer"
        )
    learned = load_checks.has_learned_positions(network, longest)
    problem = beyond_context(recipe, (data.train, data.eval), longest, learned)
    if problem is None:
        return []
    if learned or recipe.data_checks == "refuse":
        raise FinetuneError(problem)
    return [problem.removesuffix(f"; {MEANT}")]


def finite_weights(engine: Engine) -> None:
    """model.name, teacher.name: weights have NaN or infinity; name a folder with intact ones."""
    of_ranks = engine.gather(soundness.not_finite(engine.module))
    names = sorted({name for names in of_ranks for name in names})
    if names:
        recipe = engine.plan.recipe
        base, teacher = recipe.model.name or "model.config", recipe.taught_by
        raise FinetuneError(soundness.blame(names, base, teacher and teacher.name))
