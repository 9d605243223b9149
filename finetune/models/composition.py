"""Report which parts of a model have an adapter, are quantized, or balance their experts."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.integrations import replace_with_bnb_linear

from finetune.kernels.balance import Balance
from finetune.models import image_parts, shell, targets
from finetune.models import model as models
from finetune.models.quantization import quantised_notes, quantization_config
from finetune.planner.families import family_of
from finetune.recipe import Recipe


def notes(model: nn.Module, recipe: Recipe) -> list[str]:
    """Notes on a loaded model: its adapter, its quantised weights, its load-balancing loss."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return [
        *([_parts_note(base, recipe)] if recipe.model.reads else []),
        *adapter_notes(model, base, recipe),
        *quantised_notes(base, recipe.model.quantization),
        *_balance_notes(base, recipe),
    ]


def _parts_note(base: nn.Module, recipe: Recipe) -> str:
    """How large the parts of a model that reads images are, and which are trained."""
    counts = (f"{part} {count:,}" for part, count in image_parts.sizes(base).items())
    return f"model.trains: {', '.join(recipe.model.trains)}; parameters: {', '.join(counts)}"


def planned(recipe: Recipe, fields: Mapping[str, Any]) -> list[str]:
    """Notes on the adapter and the quantization of a model that is known by its config only.

    Raises:
        FinetuneError: the adapter does not fit the model, or transformers cannot build it.
    """
    kind = recipe.model.quantization
    base = shell.from_fields(recipe, fields)
    if (packing := quantization_config(kind, torch.bfloat16)) is not None:
        base = replace_with_bnb_linear(base, ["lm_head"], packing)
    with torch.device("meta"):
        trained = models.as_trained(base, recipe)
    return [*adapter_notes(trained, base, recipe), *quantised_notes(base, kind)]


def adapter_notes(model: nn.Module, base: nn.Module, recipe: Recipe) -> list[str]:
    """What `all-linear` trains in a model with experts, or leaves out in any other model."""
    if recipe.adapter is None or recipe.adapter.targets != targets.ALL:
        return []
    found = targets.reach(model, base)
    return [found.line()] if found.left or targets.has_experts(base) else []


def _balance_notes(base: nn.Module, recipe: Recipe) -> list[str]:
    """Whether the load-balancing loss of experts is added."""
    asked, config = recipe.model.router_aux_loss, base.config
    balance: Balance | None = base.balance
    if balance is not None:
        source = "output_router_logits of config.json" if asked == "model" else "as the recipe says"
        return [
            f"model.router_aux_loss: {balance.coefficient:g} x the load-balancing loss of the "
            f"experts, by document, is added to the loss of training ({source})"
        ]
    fields = config.to_dict()
    if asked == "none" and fields.get("output_router_logits"):
        return ["model.router_aux_loss: none, although config.json has output_router_logits=true"]
    default = family_of(config.model_type).balance
    known = default is not None and targets.has_experts(base)
    if known and recipe.adapter is None and asked == "model":
        return [
            "model.router_aux_loss: no load-balancing loss is added while routers are trained, "
            "because config.json has output_router_logits=false; a factor such as "
            f"{fields.get('router_aux_loss_coef') or default:g} adds one"
        ]
    return []
