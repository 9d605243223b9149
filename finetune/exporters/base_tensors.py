"""Read the weights of a base model a module at a time, in the names that its modules have."""

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
from finetune.errors import FinetuneError
from finetune.inference.load import base_config, base_model, load_weights, tensor_shapes
from finetune.kernels.quantised import dequantize_4bit, quantize_4bit
from finetune.models.load_checks import reading
from finetune.planner.shapes.config_files import config_paths
from finetune.planner.shapes.prequantised import stored_kind
from finetune.recipe import Model, Recipe

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model whose weights are read when they are needed."""

    network: PreTrainedModel
    """Its modules on the meta device."""
    units: tuple[tuple[str, ...], ...]
    """Names of tensors that are read together: those of a module, or of a layer that transformers
    joins or splits while it loads it. Tied tensors have one name."""
    read: Callable[[tuple[str, ...]], Tensors]
    """Tensors of a unit as they are stored."""


def open_base(recipe: Recipe) -> Base:
    """The base of a recipe, in the precision of its files.

    Weights that are quantised, pickled or drawn from a seed are loaded completely, in fp32: so is a
    base that gets a score head.

    Raises:
        FinetuneError: it cannot be loaded, or lacks tensors.
    """
    files = base_files(recipe)
    drawn = not files or recipe.scores is not None
    if drawn or stored_kind(base_config(recipe).to_dict()) is not None:
        return in_memory(base_model(recipe, torch.float32, quantized=False, device="cpu"))
    return _on_disk(recipe.model, str(recipe.model.name), files)


def open_trained(recipe: Recipe, folder: Path) -> Base:
    """The whole model that a run saved."""
    if recipe.scores is not None:
        return in_memory(load_weights(folder, torch.float32, device="cpu", scores=recipe.scores))
    return _on_disk(recipe.model, folder, weight_files([folder]))


def as_trained(base: Base, dtype: torch.dtype) -> Base:
    """The base as NF4 leaves it: quantised from a dtype as for training, and dequantised again.

    Raises:
        FinetuneError: bitsandbytes would quantise layers that have no plain linear weight.
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
    """Whether transformers (5.23) leaves a module out of quantisation (`should_convert_module`)."""
    return any(re.match(f"{each}\\.", path) or path.endswith(each) for each in skipped or ())


def through_nf4(weight: torch.Tensor) -> torch.Tensor:
    """A matrix (out, in) as an NF4 layer computes with it, in its own dtype."""
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return dequantize_4bit(packed, state)


def rounded(network: PreTrainedModel, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Tensors as the files have them: in a dtype, but for those that transformers keeps in fp32."""
    values = {
        name: value.to(result_dtype(network, name, dtype)) if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    return dict(revert_weight_conversion(network, values))


def result_dtype(network: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a floating tensor in files of a dtype: fp32 where transformers keeps it so."""
    strict: Any = network._keep_in_fp32_modules_strict or ()
    return torch.float32 if in_fp32(name, strict) else dtype


def base_files(recipe: Recipe) -> list[Path]:
    """The safetensors files of a recipe's base that are on this machine."""
    if recipe.model.name is None:
        return []
    paths = config_paths(str(recipe.model.name), recipe.model.revision)
    return weight_files(config.parent for config in paths)


def weight_files(folders: Iterable[Path]) -> list[Path]:
    """The safetensors files of the first of some folders that has any."""
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
    """A model that is loaded already."""
    tensors = model.state_dict()
    with torch.device("meta"):
        network = type(model)(model.config)
    inner: Any = network
    inner._weight_conversions = getattr(model, "_weight_conversions", None)
    network.generation_config = getattr(model, "generation_config", None)  # none to give scores
    units: dict[str, list[str]] = {}
    for name in distinct(network):
        units.setdefault(_module(name), []).append(name)

    def read(names: tuple[str, ...]) -> Tensors:
        return {name: tensors[name] for name in names}

    return Base(network.eval(), tuple(map(tuple, units.values())), read)


def distinct(network: PreTrainedModel) -> list[str]:
    """Names of the tensors that a saved model has, each of those that are tied once."""
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
    )
    mapping = get_model_conversion_mapping(network)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    known, wanted = network.state_dict(), distinct(network)
    place: dict[str, tuple[Path, str]] = {}
    """File and key of each tensor that is stored as the model has it."""
    converted: dict[str, list[tuple[Path, str]]] = {}
    """Files and keys that become the other tensors of a layer."""
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
    """Tensors of a layer as transformers (5.23) makes them of those in the files."""
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
    if problems:
        raise FinetuneError(*(f"{stored[0][0]}: {problem}" for problem in problems))
    found = {name: owner[last].data for name, (owner, last) in meta.items()}
    for name, (owner, last) in meta.items():
        owner[last] = before[name]
    return found


def _owner(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The table in which a module keeps a parameter, and its name there."""
    module, _, last = name.rpartition(".")
    return network.get_submodule(module)._parameters, last
