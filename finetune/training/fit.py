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
            embeddings are learned.
    """
    context = load_checks.context_length(network.config)
    if context is None:
        return []
    learned = load_checks.has_learned_positions(network, context)
    context -= recipe.batch.max_length - recipe.encoded_length  # room for a sampled completion
    problem = beyond_context((data.train, data.eval), context, learned)
    if problem is None:
        return []
    if learned or recipe.data_checks == "refuse":
        raise FinetuneError(problem)
    return [problem.removesuffix(f"; {MEANT}")]
