"""Build the complete model of a run without values, on the meta device."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from finetune.distributed.base import Engine
from finetune.distributed.layers import network_of
from finetune.errors import reading
from finetune.models import resume_adapter, scoring
from finetune.models.model import as_trained, install_kernels
from finetune.models.network import causal
from finetune.models.packed_attention import implementation
from finetune.recipe import Recipe


def blank(engine: Engine) -> nn.Module | None:
    """A model with the names of the trained one, on the meta device, for `Engine.gathered`.

    It computes what the model of a single process computes, without checkpoints of activations.
    None if each process of the engine can run the trained model.
    """
    plan = engine.plan
    if not plan.backend.axes.any:
        return None
    model = dataclasses.replace(plan.recipe.model, activation_checkpointing=False)
    recipe = dataclasses.replace(plan.recipe, model=model)
    config = copy.deepcopy(network_of(engine.module).config)
    with torch.device("meta"):
        network = scoring.auto_class(recipe.head, recipe.model.reads).from_config(
            config, attn_implementation=implementation(recipe, causal(config))
        )
        given = None if model.adapter is None else resume_adapter.prepare_base(network, recipe)
        found = as_trained(network, recipe, given=given)
    install_kernels(network, plan)
    return found.requires_grad_(False).eval()


def from_fields(recipe: Recipe, fields: Mapping[str, Any]) -> PreTrainedModel:
    """The base of a recipe, known only by the fields of its config.json.

    Raises:
        FinetuneError: transformers cannot build it.
    """
    given = {**fields, **recipe.head.config}
    kind = given.pop("model_type")
    with reading("model: transformers cannot build it"):
        config = AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            return scoring.auto_class(recipe.head, recipe.model.reads).from_config(config)
