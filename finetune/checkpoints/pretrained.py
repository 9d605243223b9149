"""Write what is usable by itself: an adapter in PEFT's format, a model as `save_pretrained` would.

Trained weights come from the fragments of a checkpoint, a part at a time. Everything else that
belongs to a result is copied from the model: buffers, and frozen weights where there is no adapter.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from finetune.checkpoints.handover import base_reference, network_of, saved_config
from finetune.distributed.base import Engine
from finetune.distributed.layers import is_elsewhere
from finetune.distributed.parameters import to_host, whole_values
from finetune.distributed.reader import Reader
from finetune.errors import TrainingFailure
from finetune.runs.run import write_json

SHARD_BYTES = 4 * 1024**3

Shapes = dict[str, tuple[int, ...]]
"""Complete shape of every trained parameter, by name."""


def is_of_teacher(name: str) -> bool:
    """Whether a module or tensor belongs to the teacher inside a student: no result holds it."""
    return re.match(r"(base_model\.model\.)?teacher(\.|$)", name) is not None


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that `save_pretrained` writes, by name."""
    for prefix, each in module.named_modules():
        if is_of_teacher(prefix):
            continue
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def kept_tensors(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of what a result needs beside the trained parameters; every rank must call this.

    Of a base with an adapter only the buffers of modules that are trained whole: the others are in
    the base's own files.
    """
    whole = engine.plan.recipe.adapter is None
    for name, buffer in persistent_buffers(engine.module):
        if engine.writes_whole and (whole or ".modules_to_save." in name):
            yield name, to_host(buffer)
    if not whole:
        return
    elsewhere = engine.elsewhere(engine.module)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad and not is_of_teacher(name):
            values = whole_values(parameter)
            if engine.writes_whole and id(parameter) not in elsewhere:
                yield name, values


def write_adapter(engine: Engine, folder: Path, reader: Reader, shapes: Shapes) -> None:
    folder.mkdir()
    module = engine.module
    kept = reader.kept()
    tensors = {
        key: kept[name] if name in kept else reader.whole(name, "weight").reshape(shapes[name])
        for key, name in adapter_keys(module, [*shapes, *kept]).items()
    }
    empty = [key for key, tensor in tensors.items() if not tensor.numel()]
    if empty or not tensors:
        raise TrainingFailure(f"{folder}: refused to write an empty adapter ({empty[:3]})")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_model: Any = module
    config = copy.copy(peft_model.peft_config["default"])
    if engine.plan.recipe.model.name is not None:
        config.base_model_name_or_path, config.revision = base_reference(engine.plan.recipe.model)
    config.inference_mode = True
    config.save_pretrained(folder)
    if engine.plan.recipe.scores is not None:  # its labels and pad token
        saved_config(network_of(module)).save_pretrained(folder)
    generation = network_of(module).generation_config
    if generation is not None:
        generation.save_pretrained(folder)


def adapter_keys(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Key in PEFT's file -> tensor of an adapter, by letting PEFT rename numbered tags.

    A parameter of two names, as of tied tables that are trained whole, has two keys.
    """
    if any(map(is_elsewhere, module.modules())):  # PEFT would miss the layers of other stages
        return {name.replace(".default.", "."): name for name in names}
    tags = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    parameters = dict(module.named_parameters())
    numbers = {id(parameters[name]): tag for name, tag in tags.items() if name in parameters}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in numbers:
            tags.setdefault(name, numbers[id(parameter)])
    renamed = get_peft_model_state_dict(module, state_dict=dict(tags), save_embedding_layers=False)
    return {key: names[int(tag.item())] for key, tag in renamed.items()}


def write_model(engine: Engine, folder: Path, reader: Reader, shapes: Shapes) -> None:
    """What `save_pretrained` writes of the whole model, a part at a time."""
    folder.mkdir()
    dtype = torch.bfloat16 if engine.plan.backend.precision == "bf16" else torch.float32
    network = network_of(engine.module)
    parts: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    total = size = 0

    def close() -> None:
        save_file(part, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(part))
        part.clear()

    for names in _by_layer([*shapes, *reader.kept()]):
        tensors = {name: _stored(network, reader, name, shapes, dtype) for name in names}
        saved = revert_weight_conversion(network, tensors)
        more = sum(tensor.nbytes for tensor in saved.values())
        if part and size + more > SHARD_BYTES:
            close()
            size = 0
        part |= {name: tensor.contiguous() for name, tensor in saved.items()}
        size, total = size + more, total + more
    close()
    _name_parts(folder, parts, total)
    write_settings(network, folder, dtype)


def write_settings(network: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """What `save_pretrained` writes beside the weights: settings, and code that came with them."""
    config = saved_config(network, dtype)
    if network.is_remote_code():
        kinds = (kind for kind in type(network).__mro__ if _is_of_its_own(kind))
        custom_object_save(object.__new__(next(kinds)), folder, config=config)
    config.save_pretrained(folder)
    if network.generation_config is not None:
        network.generation_config.save_pretrained(folder)


def _is_of_its_own(kind: type) -> bool:
    """Whether a class is code that came with a model; engines put classes of theirs before it."""
    return kind.__module__.startswith("transformers_modules.")


def _by_layer(names: list[str]) -> list[list[str]]:
    """Names in groups whose tensors the hub's layout may join or split: those of one layer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


def _stored(
    network: PreTrainedModel,
    reader: Reader,
    name: str,
    shapes: Shapes,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor of the result: buffers as they are, weights in a dtype.

    Weights that transformers loads in fp32 whatever the dtype are kept so.
    """
    kept = reader.kept()
    values = kept[name] if name in kept else reader.whole(name, "weight").reshape(shapes[name])
    strict: Any = network._keep_in_fp32_modules_strict
    if name not in shapes and not _is_parameter(network, name):
        return values
    return values.float() if in_fp32(name, strict or ()) else values.to(dtype)


def _is_parameter(network: PreTrainedModel, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        return last in network.get_submodule(owner)._parameters
    except AttributeError:  # of another stage, where buffers are those of this one's layers
        return True


def in_fp32(name: str, patterns: Any) -> bool:
    """Whether transformers keeps a tensor in fp32 (`_keep_in_fp32_modules_strict`, 5.23)."""
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _name_parts(folder: Path, parts: list[list[str]], total: int) -> None:
    """Give the parts of a model their final names, and several of them an index."""
    index: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        one = len(parts) == 1
        file = "model.safetensors" if one else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number - 1}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    if len(parts) > 1:
        metadata = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", metadata)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round weights as `from_pretrained` does: some stay in fp32 whatever the dtype."""
    strict: Any = model._keep_in_fp32_modules_strict
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.is_floating_point() and not in_fp32(name, strict or ()):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


def forget_stored_form(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make plain weights of what transformers dequantised, also where they are saved again.

    transformers 5.23 leaves unquantised tensors in the dtype of their file, and would write a
    dequantised model in the form that it was read in, without its quantisation in config.json.
    """
    cast(model, dtype)
    save_as_published(model)


def save_as_published(model: PreTrainedModel) -> None:
    """Let a model be written in the names and shapes that the hub has for its kind.

    transformers 5.23 derives them from what was read; of a model from scratch nothing was, and
    of one that FSDP has given another class it would derive none.
    """
    inner: Any = model
    read = getattr(model, "_weight_conversions", None) or ()
    prefixes = {str(each.source_patterns) for each in read if isinstance(each, PrefixChange)}
    inner._weight_conversions = [
        each
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(each, PrefixChange) or str(each.source_patterns) in prefixes
    ]
