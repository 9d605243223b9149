"""Check that the data fits the model's context length, before the engine is built."""

import torch

from finetune.data.audit import MEANT, beyond_context
from finetune.data.prepare import Prepared
from finetune.errors import FinetuneError
from finetune.models import load_checks
from finetune.recipe import Recipe


def check_context(recipe: Recipe, network: torch.nn.Module, data: Prepared) -> list[str]:
    """Refuse rows longer than the model's context; returns notes if the recipe allows them.

    Raises:
        FinetuneError: there are such rows, and `data_checks` is `refuse` or the model's position
            embeddings are learned; or completions alone exceed the context.
    """
    context = load_checks.context_length(network.config)
    if context is None:
        return []
    if recipe.completion_length >= context:
        raise FinetuneError(
            f"max_completion_length: {recipe.completion_length:,} tokens leave none of the model's "
            f"context of {context:,} for a prompt; use fewer"
        )
    learned = load_checks.has_learned_positions(network, context)
    problem = beyond_context(recipe, (data.train, data.eval), context, learned)
    if problem is None:
        return []
    if learned or recipe.data_checks == "refuse":
        raise FinetuneError(problem)
    return [problem.removesuffix(f"; {MEANT}")]
