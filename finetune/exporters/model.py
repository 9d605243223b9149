"""Export a whole model: all weights that were trained, or an adapter merged into its base."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.checkpoints.base_weights import refuse_other_base
from finetune.checkpoints.handover import saved_config
from finetune.checkpoints.pretrained import cast
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters.source import Source
from finetune.inference.load import attach, base_config, base_model, load_weights, tensor_shapes
from finetune.recipe import Recipe
from finetune.reports.card import Kind

TOLERANCE = 1e-4
"""Largest difference between logits before and after a merge in fp32, relative to the largest
logit. Sums in another order gave up to 1.4e-5 over 32 layers; a merge rounded to bf16 gives 1e-3,
and a lost head or adapter more."""


def write(source: Source, folder: Path) -> Kind:
    """Write the whole model that was trained.

    Raises:
        FinetuneError: the run trained an adapter.
        TrainingFailure: what was written lacks tensors.
    """
    if source.adapter is not None:
        raise FinetuneError(
            "--format model: the run trained an adapter; export it as 'adapter' or 'merged'"
        )
    recipe = source.recipe
    whole = load_weights(
        source.checkpoint / "model",
        source.dtype or _stored_dtype(recipe),
        trust_remote_code=recipe.model.trust_remote_code,
        attention=recipe.model.attention,
        device="cpu",
        scores=recipe.scores,
    )
    _write_model(whole, recipe, source.generation, folder, source.shard_size)
    return "model"


def write_merged(source: Source, folder: Path) -> Kind:
    """Write base and adapter as one model, merged in fp32 and rounded once.

    Raises:
        FinetuneError: the run has no adapter, or the base is not the one that it was trained on.
        TrainingFailure: the merged model answers otherwise, or what was written lacks tensors.
    """
    recipe = source.recipe
    if source.adapter is None:
        raise FinetuneError("--format merged: the run trained all weights; export it as 'model'")
    base = base_model(recipe, torch.float32, quantized=False, device="cpu")
    refuse_other_base(source.checkpoint, recipe.model)
    if recipe.scores is not None:
        base.config.pad_token_id = AutoConfig.from_pretrained(source.adapter).pad_token_id
    merged = _merge(base, source.adapter, source.initial, source.tokenizer)
    cast(merged, source.dtype or _stored_dtype(recipe))
    _write_model(merged, recipe, source.generation, folder, source.shard_size)
    return "merged"


def _merge(
    base: PreTrainedModel, adapter: Path, initial: Path | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Base and adapter as one model in fp32, whose logits were compared with the adapter's."""
    model = attach(base, adapter, initial)
    ids = torch.tensor([tokenizer("Write one line about the sea.")["input_ids"]])  # (1, tokens)
    before = _logits(model, ids)
    _untie(model)
    tuner: Any = model.base_model  # PEFT's wrapper has no type for what it forwards
    merged = tuner.merge_and_unload(safe_merge=True)
    after = _logits(merged, ids)
    difference = ((after - before).abs().max() / before.abs().max()).item()
    if not difference <= TOLERANCE:
        raise TrainingFailure(
            f"{adapter}: the merged model's logits differ from the adapter's by "
            f"{difference:.1e} of the largest (at most {TOLERANCE:.0e} is rounding); export "
            "without merging"
        )
    return merged


@torch.inference_mode()
def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits  # (1, tokens, vocabulary), or (1, labels)


def _untie(model: PeftModel) -> None:
    """Give an adapted embedding or head its own weight, so that a merge changes only that one.

    PEFT (0.21) adds the product to the weight that both share; afterwards it sees by itself that
    they differ, and says so in the model's config.
    """
    base: Any = model.get_base_model()
    if not base.config.tie_word_embeddings:
        return
    for layer in (base.get_output_embeddings(), base.get_input_embeddings()):
        if isinstance(layer, LoraLayer):
            inner = layer.get_base_layer()
            inner.weight = torch.nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def _write_model(
    model: PreTrainedModel,
    recipe: Recipe,
    generation: GenerationConfig | None,
    folder: Path,
    shard_size: str,
) -> None:
    model.generation_config = generation
    model.config = saved_config(model, model.config.dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    _refuse_lost(folder, recipe)


def _refuse_lost(folder: Path, recipe: Recipe) -> None:
    """Read the files back: they give every tensor of the model its shape, and none is empty."""
    load_weights(
        folder,
        trust_remote_code=recipe.model.trust_remote_code,
        attention=recipe.model.attention,
        device="meta",
        scores=recipe.scores,
    )
    for path in folder.glob("model*.safetensors"):
        empty = [name for name, shape in tensor_shapes(path).items() if 0 in shape]
        if empty:
            raise TrainingFailure(*(f"{path}: {name} is empty" for name in empty))


def _stored_dtype(recipe: Recipe) -> torch.dtype:
    """Of the base model's files; fp32 for a model from scratch that names none."""
    dtype = base_config(recipe).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
