"""A model that reads images: its tower, its connector and its language model, and its inputs."""

import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.data.images.inputs import ImageInputs
from finetune.data.images.processor import ImageProcessor
from finetune.distributed.layers import network_of
from finetune.errors import FinetuneError, reading
from finetune.models.load_checks import full_shape, plain_name
from finetune.models.scoring import head_of
from finetune.recipe import Model, Recipe

LANGUAGE, CONNECTOR, TOWER = "language", "connector", "tower"
MERGERS = ("merger", "merger_list", "patch_merger", "deepstack_merger_list", "connector")
"""Modules inside of a tower that connect it with the language model, by their names in
transformers."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Inputs that mark tokens of images, by their names in transformers."""
OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "document_ends")
"""Inputs that say where documents end; attention of a tower would read them as ends of images."""


def image_inputs(model: Model, processor: ImageProcessor | None, alone: bool) -> ImageInputs | None:
    """How images become inputs of a model, from its config alone; None if it reads text only.

    Args:
        model: The recipe's model.
        processor: Its image processor.
        alone: Whether one process trains it; others must run the tower in equally many passes.
    """
    if processor is None:
        return None
    everywhere = not alone or {TOWER, CONNECTOR} & set(model.trains) != set()
    return inputs_for(config_of(model), processor, everywhere)


def config_of(model: Model) -> PreTrainedConfig:
    """The config of a recipe's model.

    Raises:
        FinetuneError: it cannot be read.
    """
    fields = dict(model.config or {})
    with reading("model: its config cannot be read"):
        if fields:
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        return AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def inputs_for(
    config: PreTrainedConfig, processor: ImageProcessor, everywhere: bool = False
) -> ImageInputs:
    """How images become inputs of the model of a config."""
    kind: Any = MODEL_MAPPING[type(config)]
    accepted = inspect.signature(kind.forward).parameters
    # `get_rope_index` reads the config alone: a model without modules has it too.
    network = kind.__new__(kind)
    nn.Module.__init__(network)
    network.config = config
    return ImageInputs(
        processor,
        everywhere,
        positions=getattr(network, "get_rope_index", None),
        token_types=next((name for name in TYPES if name in accepted), None),
    )


# Parts.


def part_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The part that each module or parameter belongs to: language, connector or tower.

    The connector is what is in neither, and `MERGERS` of the tower.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    head = paths.get(id(head_of(model)))
    language = [paths[id(model.get_decoder())], *([] if head is None else [head])]
    tower = paths[id(model.get_encoder(modality="image"))]
    inside = [f"{tower}.{name}" for name in MERGERS]

    def part(name: str) -> str:
        if any(_is_inside(name, path) for path in language):
            return LANGUAGE
        if any(_is_inside(name, path) for path in inside):
            return CONNECTOR
        return TOWER if _is_inside(name, tower) else CONNECTOR

    return {name: part(plain_name(name)) for name in names}


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def sizes(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of each part, without those of adapters."""
    found = dict.fromkeys((LANGUAGE, CONNECTOR, TOWER), 0)
    named = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
    for name, part in part_of(model, named).items():
        found[part] += full_shape(named[name]).numel()
    return found


def freeze_parts(model: PreTrainedModel, recipe: Recipe) -> None:
    """Freeze the parameters of the parts that `model.trains` does not name.

    Raises:
        FinetuneError: a part that it names has no parameters, or all are frozen by `trainable`.
    """
    if not recipe.model.reads:
        return
    trained = dict.fromkeys(recipe.model.trains, 0)
    parameters = dict(model.named_parameters())
    for name, part in part_of(model, parameters).items():
        if part not in trained:
            parameters[name].requires_grad_(False)
        elif parameters[name].requires_grad:
            trained[part] += 1
    empty = [part for part, count in trained.items() if not count]
    if empty:
        raise FinetuneError(
            f"model.trains: {', '.join(empty)}: {type(model).__name__} has no trained parameters "
            f"there; leave it out, or change model.trainable"
        )


def within_parts(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """A recipe whose adapter leaves out modules of parts that `model.trains` does not name."""
    adapter = recipe.adapter
    if not recipe.model.reads or adapter is None:
        return recipe
    roots = outside(model, recipe.model.trains)
    given = adapter.exclude_modules
    patterns = [given] if isinstance(given, str) else [rf"(?:.*\.)?{re.escape(n)}" for n in given]
    new = [
        rf"{re.escape(root)}(?:\..*)?"
        for root in roots
        if not any(re.fullmatch(pattern, root) for pattern in patterns)
    ]
    left_out = "|".join(f"(?:{pattern})" for pattern in (*patterns, *new))
    changed = dataclasses.replace(adapter, exclude_modules=left_out or ())
    return dataclasses.replace(recipe, adapter=changed)


def outside(model: PreTrainedModel, parts: tuple[str, ...]) -> list[str]:
    """The outermost modules without a parameter of some parts."""
    owners = part_of(model, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    inside = {
        name.rsplit(".", count)[0]
        for name, part in owners.items()
        if part in parts
        for count in range(1, name.count(".") + 1)
    }
    roots = list[str]()
    for name, module in model.named_modules():
        has_some = next(module.parameters(), None) is not None
        if name and has_some and name not in inside and not any(_is_inside(name, r) for r in roots):
            roots.append(name)
    return roots


# Loading.


def attention_by_part(config: PreTrainedConfig, text: str, other: str) -> dict[str, str]:
    """Attention implementations for transformers: that of documents is for the language model.

    A tower is not causal, and its images are no documents of the text.
    """
    own = "text_config" if "text_config" in config.sub_configs else ""
    return {"": other, **dict.fromkeys(config.sub_configs, other), own: text}


def unquantised(config: PreTrainedConfig) -> list[str]:
    """Modules that bitsandbytes leaves alone: the head, and all outside of the language model.

    A tower is small, and its errors are those of every token of an image.
    """
    model = without_weights(config)
    paths = {id(module): path for path, module in model.named_modules()}
    return [*outside(model, (LANGUAGE,)), paths[id(model.get_output_embeddings())]]


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the `meta` device."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def leave_documents_out(model: PreTrainedModel) -> None:
    """Hide the ends of documents from the tower, to which transformers 5.23 passes every input."""

    def without(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {key: value for key, value in given.items() if key not in OF_DOCUMENTS}

    model.get_encoder(modality="image").register_forward_pre_hook(without, with_kwargs=True)


# Gradients.


def ask_text_alone(model: PreTrainedModel) -> None:
    """Let checkpoints ask for gradients of embedded tokens alone, as PEFT 0.21 does once more.

    transformers 5.23 also asks for those of pixels, for which a frozen tower would be run again.
    """
    model.enable_input_require_grads = model.get_decoder().enable_input_require_grads


def unreached(
    model: nn.Module, by_text: list[str], image: dict[str, torch.Tensor]
) -> list[str] | None:
    """Names of trained parameters that get no gradient from a text and an image.

    A feature of an inner layer leaves the layers behind it unused (LLaVA). None if the image cannot
    be passed through, as through weights that ZeRO-3 has partitioned.

    Args:
        model: Model with its adapter.
        by_text: Names that get none from a text.
        image: Tensors of an image.
    """
    network: Any = network_of(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = part_of(network, trained)
    seen = [name for name in trained if parts[name] != LANGUAGE]
    left = [name for name in by_text if parts[name] == LANGUAGE]
    if not seen:
        return left
    taken = inspect.signature(network.base_model.get_image_features).parameters
    place = trained[seen[0]]
    given = {name: value.to(place.device) for name, value in image.items() if name in taken}
    try:
        with torch.enable_grad(), torch.autocast(place.device.type, enabled=False):
            total = sum(each.float().sum() for each in _features(network, given))
        found = torch.autograd.grad(total, [trained[name] for name in seen], allow_unused=True)
    except Exception:  # whatever a model raises for partitioned weights
        return None
    return left + [name for name, grad in zip(seen, found, strict=True) if grad is None]


def _features(network: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All features of an image: the last ones, and those of inner layers (Qwen3-VL)."""
    output = network.base_model.get_image_features(**given, return_dict=True)
    found, left = list[torch.Tensor](), [output.pooler_output]
    left += [getattr(output, "deepstack_features", None)]
    while left:
        value = left.pop()
        left += value if isinstance(value, list | tuple) else []
        found += [value] if isinstance(value, torch.Tensor) else []
    return found
