"""Read the weights of a base model one module at a time, under the names of its parameters."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from finetune.checkpoints.pretrained import in_fp32
from finetune.errors import FinetuneError, reading, refuse
from finetune.inference.load import base_config, base_model, load_weights, tensor_shapes
from finetune.kernels.quantised import dequantize_4bit, quantize_4bit
from finetune.planner.shapes.config_files import config_paths
from finetune.planner.shapes.prequantised import stored_kind
from finetune.recipe import Model, Recipe

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model with lazily read weights."""

    network: PreTrainedModel
    """The model on the meta device."""
    units: tuple[tuple[str, ...], ...]
    """Names of tensors that are read together: the tensors of a module, or of a layer whose tensors
    transformers joins or splits during loading. Tied tensors have one name."""
    read: Callable[[tuple[str, ...]], Tensors]
    """Reads the tensors of a unit in their stored precision."""


def open_base(recipe: Recipe) -> Base:
    """The base of a recipe, in the precision of its files.

    Weights that are quantized, pickled or initialized from a seed, and a base that gets a score
    head, are loaded into memory in fp32.

    Raises:
        FinetuneError: the base cannot be loaded, or lacks tensors.
    """
    files = base_files(recipe)
    drawn = not files or recipe.head.scored
    if drawn or stored_kind(base_config(recipe).to_dict()) is not None:
        return in_memory(base_model(recipe, torch.float32, quantized=False, device="cpu"))
    return _on_disk(recipe.model, str(recipe.model.name), files)


def open_trained(recipe: Recipe, folder: Path) -> Base:
    """The full model that a run saved."""
    if recipe.head.scored:
        return in_memory(load_weights(folder, torch.float32, device="cpu", head=recipe.head))
    return _on_disk(recipe.model, folder, weight_files([folder]))


def as_trained(base: Base, dtype: torch.dtype) -> Base:
    """The base with weights quantized to NF4 from `dtype` as in training, and dequantized.

    Raises:
        FinetuneError: bitsandbytes would quantize layers without a plain linear weight.
    """
    skipped = HfQuantizer.get_modules_to_not_convert(base.network, None, None)
    kinds = {
        path: type(module)
        for path, module in base.network.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _skips(path, skipped)
    }
    if Conv1D in kinds.values():
        raise FinetuneError("--merge-into nf4: the model has Conv1D layers; merge without it")
    names = {f"{path}.weight" for path in kinds}

    def read(unit: tuple[str, ...]) -> Tensors:
        found = base.read(unit)
        return {
            name: through_nf4(value.to(dtype)) if name in names else value
            for name, value in found.items()
        }

    return dataclasses.replace(base, read=read)


def _skips(path: str, skipped: list[str] | None) -> bool:
    """Whether transformers (5.23) skips a module in quantization (`should_convert_module`)."""
    return any(re.match(f"{each}\\.", path) or path.endswith(each) for each in skipped or ())


def through_nf4(weight: torch.Tensor) -> torch.Tensor:
    """A matrix (out, in) quantized to NF4 and dequantized, in its own dtype."""
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return dequantize_4bit(packed, state)


def rounded(network: PreTrainedModel, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Tensors in the format of the files, in `dtype` unless transformers keeps them in fp32."""
    values = {
        name: value.to(result_dtype(network, name, dtype)) if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    return dict(revert_weight_conversion(network, values))


def result_dtype(network: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Data type of a stored floating-point tensor: `dtype`, or fp32 if transformers requires it."""
    strict: Any = network._keep_in_fp32_modules_strict or ()
    return torch.float32 if in_fp32(name, strict) else dtype


def base_files(recipe: Recipe) -> list[Path]:
    """The local safetensors files of a recipe's base."""
    if recipe.model.name is None:
        return []
    paths = config_paths(str(recipe.model.name), recipe.model.revision)
    return weight_files(config.parent for config in paths)


def weight_files(folders: Iterable[Path]) -> list[Path]:
    """The safetensors files of the first folder that has any."""
    for folder in folders:
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file():
            return [folder / "model.safetensors"]
        if index.is_file():
            with reading(f"{index}: cannot be read"):
                parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                return [folder / part for part in sorted(set(parts))]
    return []


def in_memory(model: PreTrainedModel) -> Base:
    """A `Base` for a model that is already loaded."""
    tensors = model.state_dict()
    with torch.device("meta"):
        network = type(model)(model.config)
    inner: Any = network
    inner._weight_conversions = getattr(model, "_weight_conversions", None)
    network.generation_config = getattr(model, "generation_config", None)  # score heads have none
    units: dict[str, list[str]] = {}
    for name in distinct(network):
        units.setdefault(_module(name), []).append(name)

    def read(names: tuple[str, ...]) -> Tensors:
        return {name: tensors[name] for name in names}

    return Base(network.eval(), tuple(map(tuple, units.values())), read)


def distinct(network: PreTrainedModel) -> list[str]:
    """Names of the tensors of a saved model; tied tensors have one name."""
    named = network.state_dict(keep_vars=True).items()
    first = {id(tensor): name for name, tensor in reversed(named)}
    return [name for name, tensor in named if first[id(tensor)] == name]


def _on_disk(model: Model, name: str | Path, files: list[Path]) -> Base:
    network = load_weights(
        name,
        torch.float32,
        revision=model.revision if name == model.name else None,
        trust_remote_code=model.trust_remote_code,
        attention=model.attention,
        device="meta",
        reads=model.reads,
    )
    mapping = get_model_conversion_mapping(network)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    known, wanted = network.state_dict(), distinct(network)
    place: dict[str, tuple[Path, str]] = {}
    """File and key of each tensor that needs no conversion."""
    converted: dict[str, list[tuple[Path, str]]] = {}
    """Files and keys of the tensors of each layer that need a conversion."""
    for path in files:
        for key in tensor_shapes(path):
            name, pattern = rename_source_key(
                key, renamings, converters, network.base_model_prefix, known
            )
            if pattern is None:
                place[name] = path, key
            else:
                converted.setdefault(_layer(name), []).append((path, key))
    units: dict[str, list[str]] = {}
    for name in wanted:
        unit = _module(name) if name in place else f"converted {_layer(name)}"
        units.setdefault(unit, []).append(name)

    def read(names: tuple[str, ...]) -> Tensors:
        if names[0] in place:
            return {name: _tensor(*place[name]) for name in names}
        return _converted(network, mapping, names, converted[_layer(names[0])])

    return Base(network, tuple(map(tuple, units.values())), read)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def _tensor(path: Path, key: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(key)


def _converted(
    network: PreTrainedModel,
    mapping: list[Any],
    names: tuple[str, ...],
    stored: list[tuple[Path, str]],
) -> Tensors:
    """Tensors of a layer, converted from the stored ones by transformers (5.23)."""
    inner: Any = network
    used, meta = inner._weight_conversions, {name: _owner(network, name) for name in names}
    tensors = {key: _tensor(path, key) for path, key in stored}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    before = {name: owner[last] for name, (owner, last) in meta.items()}
    for owner, last in meta.values():
        owner[last] = nn.Parameter(owner[last].to(dtype), requires_grad=False)
    settings = LoadStateDictConfig(dtype=dtype, weight_mapping=mapping, device_map={"": "cpu"})
    info, _ = convert_and_load_state_dict_in_model(network, tensors, settings)
    inner._weight_conversions = used
    problems = [*info.conversion_errors.values(), *info.error_msgs]
    refuse(f"{stored[0][0]}: {problem}" for problem in problems)
    found = {name: owner[last].data for name, (owner, last) in meta.items()}
    for name, (owner, last) in meta.items():
        owner[last] = before[name]
    return found


def _owner(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The parameter dictionary of the module that owns a parameter, and the key in it."""
    module, _, last = name.rpartition(".")
    return network.get_submodule(module)._parameters, last
