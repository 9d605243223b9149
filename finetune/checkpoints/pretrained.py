"""Write loadable results: an adapter in PEFT's format, or a model as `save_pretrained` would.

Trained weights are read from the fragments of a checkpoint, one part at a time. The other tensors
of a result are copied from the model: buffers and, without an adapter, frozen weights.
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

from finetune.checkpoints.stop_tokens import base_reference, network_of, saved_config
from finetune.distributed.averages import result
from finetune.distributed.base import Engine
from finetune.distributed.complete import tensors
from finetune.distributed.layers import complete
from finetune.distributed.parameters import to_host, unsharded_values
from finetune.distributed.reader import Reader
from finetune.errors import TrainingFailure
from finetune.recipe import Optim
from finetune.runs.run import write_json

SHARD_BYTES = 4 * 1024**3

Shapes = dict[str, tuple[int, ...]]
"""Unsharded shape of every trained parameter, by name."""


def is_of_teacher(name: str) -> bool:
    """Whether a module or tensor belongs to a student's teacher, which is not part of results."""
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
    """Copies of the tensors that a result needs in addition to trained parameters; collective.

    With an adapter, only its own buffers and those of `modules_to_save`: the others are in the
    base's own files.
    """
    is_full = engine.plan.recipe.adapter is None
    for name, buffer in persistent_buffers(engine.module):
        own = ".modules_to_save." in name or name.endswith(".default")
        if engine.writes_unsharded and (is_full or own):
            yield name, to_host(buffer)
    if not is_full:
        return
    elsewhere = engine.counted_elsewhere(engine.module)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad and not is_of_teacher(name):
            values = unsharded_values(parameter)
            if engine.writes_unsharded and id(parameter) not in elsewhere:
                yield name, values


def write_adapter(engine: Engine, folder: Path, reader: Reader, shapes: Shapes) -> None:
    folder.mkdir()
    module, optim = engine.module, engine.plan.recipe.optim
    kept = reader.kept()
    saved = {
        key: kept[name].clone() if name in kept else _trained(reader, name, shapes, optim)
        for key, name in adapter_keys(module, [*shapes, *kept]).items()
    }
    empty = [key for key, tensor in saved.items() if not tensor.numel()]
    if empty or not saved:
        raise TrainingFailure(f"{folder}: refused to write an empty adapter ({empty[:3]})")
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(complete(module).peft_config["default"])
    if engine.plan.recipe.model.name is not None:
        config.base_model_name_or_path, config.revision = base_reference(engine.plan.recipe.model)
    config.inference_mode = True
    config.save_pretrained(folder)
    if engine.plan.recipe.head.scored:  # the config has its labels and pad token
        saved_config(network_of(module)).save_pretrained(folder)
    generation = network_of(module).generation_config
    if generation is not None:
        generation.save_pretrained(folder)


def adapter_keys(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Map keys of PEFT's file to names of tensors, by letting PEFT rename numbered tags.

    A tensor with two names, such as tied embeddings in `modules_to_save`, has two keys.
    """
    module = complete(module)  # PEFT would not see the layers of other stages
    tags = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    held = tensors(module)
    numbers = {id(held[name]): tag for name, tag in tags.items() if name in held}
    for name, tensor in held.items():
        if id(tensor) in numbers:
            tags.setdefault(name, numbers[id(tensor)])
    renamed = get_peft_model_state_dict(module, state_dict=dict(tags), save_embedding_layers=False)
    return {key: names[int(tag.item())] for key, tag in renamed.items()}


def write_model(engine: Engine, folder: Path, reader: Reader, shapes: Shapes) -> None:
    """Write the unsharded model as `save_pretrained` does, one part at a time."""
    folder.mkdir()
    dtype = torch.bfloat16 if engine.plan.backend.precision == "bf16" else torch.float32
    network, optim = network_of(engine.module), engine.plan.recipe.optim
    parts: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    total = size = 0

    def close() -> None:
        save_file(part, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(part))
        part.clear()

    for names in _by_layer([*shapes, *reader.kept()]):
        tensors = {name: _stored(network, reader, name, shapes, dtype, optim) for name in names}
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
    """Write what `save_pretrained` writes next to the weights: configs, and the model's code."""
    config = saved_config(network, dtype)
    if network.is_remote_code():
        kinds = (kind for kind in type(network).__mro__ if _is_custom_code(kind))
        custom_object_save(object.__new__(next(kinds)), folder, config=config)
    config.save_pretrained(folder)
    if network.generation_config is not None:
        network.generation_config.save_pretrained(folder)


def _is_custom_code(kind: type) -> bool:
    """Whether a class is code that came with a model, not one that an engine derived from it."""
    return kind.__module__.startswith("transformers_modules.")


def _by_layer(names: list[str]) -> list[list[str]]:
    """Names grouped by layer: the hub's layout may fuse or split tensors within a layer."""
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
    optim: Optim,
) -> torch.Tensor:
    """A tensor of the result: buffers unchanged, weights cast to `dtype`.

    Weights that transformers always loads in fp32 stay in fp32.
    """
    kept = reader.kept()
    values = kept[name] if name in kept else _trained(reader, name, shapes, optim)
    strict: Any = network._keep_in_fp32_modules_strict
    if name not in shapes and name in dict(complete(network).named_buffers()):
        return values
    return values.float() if in_fp32(name, strict or ()) else values.to(dtype)


def _trained(reader: Reader, name: str, shapes: Shapes, optim: Optim) -> torch.Tensor:
    """A trained tensor of the result, complete."""
    state = {key: key for key in reader.keys(name)}
    weight = reader.full(name, "weight")
    return result(weight, state, optim, lambda key: reader.full(name, key)).reshape(shapes[name])


def in_fp32(name: str, patterns: Any) -> bool:
    """Whether transformers keeps a tensor in fp32 (`_keep_in_fp32_modules_strict` in 5.23)."""
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _name_parts(folder: Path, parts: list[list[str]], total: int) -> None:
    """Rename the parts of a model to their final names; write an index if there are several."""
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
    """Cast weights as `from_pretrained` does: some always stay in fp32."""
    strict: Any = model._keep_in_fp32_modules_strict
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.is_floating_point() and not in_fp32(name, strict or ()):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


def forget_stored_form(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make a dequantized model a plain one in `dtype`, also for saving.

    transformers 5.23 leaves unquantized tensors in the dtype of their file, and would save a
    dequantized model in its quantized layout, without the quantization in config.json.
    """
    cast(model, dtype)
    save_as_published(model)


def save_as_published(model: PreTrainedModel) -> None:
    """Make `save_pretrained` use the names and shapes that the hub has for this architecture.

    transformers 5.23 derives them from the loaded file; it has none for a model from scratch, and
    finds none for a model whose class FSDP has replaced.
    """
    inner: Any = model
    read = getattr(model, "_weight_conversions", None) or ()
    prefixes = {str(each.source_patterns) for each in read if isinstance(each, PrefixChange)}
    inner._weight_conversions = [
        each
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(each, PrefixChange) or str(each.source_patterns) in prefixes
    ]
