"""Export the adapter in PEFT's format, as a plain LoRA if its initialization changed the base."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters.source import Source
from finetune.inference.load import (
    ADAPTER_WEIGHTS,
    RECOMPUTED,
    base_config,
    base_model,
    changes_base,
    check_adapter,
    needs_initial,
    plain_lora,
    tensor_shapes,
)
from finetune.models.scoring import auto_class
from finetune.recipe import Recipe
from finetune.reports.card import Kind


def check(source: Source) -> LoraConfig:
    """The adapter configuration to write.

    Raises:
        FinetuneError: the run has no adapter, the adapter is incomplete, or its initialization
            cannot be recomputed.
    """
    config = _trained_config(source)
    if not changes_base(config):
        return config
    if source.initial is None and str(config.init_lora_weights).lower() not in RECOMPUTED:
        assert source.adapter is not None, "checked"
        raise needs_initial(source.adapter, config)
    return _twice_the_rank(config)


def _trained_config(source: Source) -> LoraConfig:
    if source.adapter is None:
        raise FinetuneError("--format adapter: the run trained all weights; export it as 'model'")
    recipe = source.recipe
    with torch.device("meta"):
        skeleton = auto_class(recipe.head, recipe.model.reads).from_config(
            base_config(recipe), trust_remote_code=recipe.model.trust_remote_code
        )
    return check_adapter(source.adapter, skeleton)


def write(source: Source, folder: Path) -> Kind:
    """Write adapter_config.json, the adapter's weights, and the stop tokens.

    Raises:
        FinetuneError: as `check`.
        TrainingFailure: the file has other tensors than were written.
    """
    config, trained = check(source), _trained_config(source)
    assert source.adapter is not None, "checked"
    tensors = load_file(source.adapter / ADAPTER_WEIGHTS)
    if changes_base(trained):
        tensors = _difference(tensors, _initial_tensors(source.recipe, trained, source.initial))
    _write_adapter(source, config, tensors, folder)
    if source.generation is not None:
        source.generation.save_pretrained(folder)
    return "adapter"


def _write_adapter(
    source: Source, config: LoraConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    recipe = source.recipe
    config.base_model_name_or_path, config.revision = source.base_name
    config.task_type = recipe.head.task_type
    if recipe.head.scored:  # PEFT reads labels and pad token only from config.json
        AutoConfig.from_pretrained(source.adapter).save_pretrained(folder)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    written = tensor_shapes(folder / ADAPTER_WEIGHTS)
    if written != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise TrainingFailure(
            f"{folder / ADAPTER_WEIGHTS}: the tensors read back differ from those written"
        )


def _initial_tensors(
    recipe: Recipe, config: LoraConfig, initial: Path | None
) -> dict[str, torch.Tensor]:
    """The adapter before its first step, as stored or recomputed from the base."""
    if initial is not None:
        return load_file(initial / ADAPTER_WEIGHTS)
    fresh = copy.deepcopy(config)
    model = get_peft_model(base_model(recipe, torch.float32, device="cpu"), fresh)
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def _difference(
    tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """B A - B0 A0 as one product [B, -B0] [A; A0], for the unmodified base.

    Training used (W - s B0 A0) + s B A, which equals W + s (B A - B0 A0).
    """
    result = dict(tensors)
    for name in tensors:
        if name.endswith("lora_A.weight"):
            result[name] = torch.cat([tensors[name], before[name].to(tensors[name])], dim=0)
        elif name.endswith("lora_B.weight"):
            result[name] = torch.cat([tensors[name], -before[name].to(tensors[name])], dim=1)
    return result


def _twice_the_rank(config: LoraConfig) -> LoraConfig:
    """The configuration of the difference: doubled ranks with the same scale."""
    growth: Any = math.sqrt(2) if config.use_rslora else 2  # PEFT's hint for alpha is int
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    twice = plain_lora(config)
    twice.r = 2 * config.r
    twice.lora_alpha = growth * config.lora_alpha
    twice.rank_pattern = {key: 2 * r for key, r in ranks.items()}
    twice.alpha_pattern = {key: growth * alpha for key, alpha in alphas.items()}
    return twice
