"""Freeze the weights that `model.trainable` does not name."""

import re

from transformers import PreTrainedModel

from finetune.distributed import layers
from finetune.errors import FinetuneError, did_you_mean, refuse
from finetune.models.gradients import grouped
from finetune.models.scoring import HEAD
from finetune.recipe import Recipe


def freeze_others(model: PreTrainedModel, recipe: Recipe) -> None:
    """Freeze every parameter whose names none of the patterns of `model.trainable` match.

    Tied tables are one parameter with two names. A score head is always trained, as with an
    adapter.

    Raises:
        FinetuneError: a pattern matches no name of the complete model, or added tokens are frozen.
    """
    whole: PreTrainedModel = layers.complete(model)
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    near = [*names, *(name.rpartition(".")[0] for name in names)]
    problems = [
        f"model.trainable: '{each}' matches no parameter of the model{did_you_mean(each, near)}; "
        f"its parameters are {grouped(names)}"
        for each in recipe.model.trainable
        if not any(re.match(each, name) for name in names)
    ]
    refuse(problems)
    wanted = (*recipe.model.trainable, *([HEAD] if recipe.head.scored else []))
    for part in {id(each): each for each in (whole, model)}.values():
        trained = {
            id(parameter)
            for name, parameter in part.named_parameters(remove_duplicate=False)
            if any(re.match(each, name) for each in wanted)
        }
        for parameter in part.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    tables = [*whole.get_input_embeddings().parameters()]
    if recipe.model.add_tokens and not any(table.requires_grad for table in tables):
        name = next(n for n, p in whole.named_parameters() if p is tables[0])
        raise FinetuneError(
            f"model.trainable: the rows of model.add_tokens would be frozen; add '{name}'"
        )
