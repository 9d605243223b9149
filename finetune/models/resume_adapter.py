"""Load the adapter that training starts from into the network, before an engine shards it."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune.checkpoints.pretrained import adapter_keys
from finetune.distributed import layers
from finetune.distributed.parameters import assign, unsharded_shape, unsharded_values
from finetune.errors import FinetuneError
from finetune.models.load_checks import first_of
from finetune.models.starting_adapter import WEIGHTS, find
from finetune.models.vocabulary import grow, rows_of_adapter
from finetune.recipe import Recipe

WRAPPED = (".base_layer", ".original_module", ".token_adapter")


def prepare_base(model: PreTrainedModel, recipe: Recipe) -> LoraConfig:
    """PEFT's configuration of the adapter; grows the base's tables to the adapter's vocabulary."""
    assert recipe.model.adapter is not None
    assert recipe.adapter is not None
    folder = find(recipe.model.adapter)
    config: Any = LoraConfig.from_pretrained(str(folder))
    config.init_lora_weights, config.inference_mode = True, False
    config.lora_dropout = recipe.adapter.dropout
    stored = {name: list(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}
    if layers.complete(model) is model:  # the tables of a pipeline's stages do not grow
        grow(model, rows_of_adapter(model, config, stored))
    return config


def load_adapter(network: PeftModel, recipe: Recipe) -> None:
    """Copy the values of the adapter into the trained parameters.

    Raises:
        FinetuneError: with tensors that are missing, unexpected, or have another shape.
    """
    assert recipe.model.adapter is not None
    folder: Path = find(recipe.model.adapter)
    tensors = load_file(folder / WEIGHTS)
    whole, here = layers.complete(network), dict(network.named_parameters(remove_duplicate=False))
    trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    keys = adapter_keys(network, list(trained))
    problems = [f"{key} is missing" for key in sorted(keys.keys() - tensors.keys())]
    for key in sorted(keys.keys() & tensors.keys()):
        wanted, got = list(unsharded_shape(trained[keys[key]])), list(tensors[key].shape)
        if got != wanted:
            problems.append(f"{key} is {got}, and the base needs {wanted}")
        elif not torch.isfinite(tensors[key]).all():
            problems.append(f"{key} has values that are not finite")
    base = {_plain(n): (n, p.shape) for n, p in whole.named_parameters(remove_duplicate=False)}
    for key in sorted(tensors.keys() - keys.keys()):
        name, shape = base.get(_plain(key), ("", None))
        if shape != tensors[key].shape:
            problems.append(f"{key} belongs to no module of the base")
        elif name in here and not torch.equal(
            unsharded_values(here[name]).float(), tensors[key].float()
        ):
            problems.append(
                f"{key} replaces a table of the base, which is not supported here: merge the "
                "adapter into the base, and train the result"
            )
    if problems:
        shown = "; ".join(first_of(problems))
        raise FinetuneError(f"model.adapter: {folder} does not fit {recipe.model.name}: {shown}")
    with torch.no_grad():
        for key, name in keys.items():
            if name in here:
                assign(here[name], tensors[key])


def _plain(name: str) -> str:
    for part in WRAPPED:
        name = name.replace(part, "")
    return name
