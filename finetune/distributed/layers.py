"""Divide a model over a mesh while transformers loads it, so a process reads only its part."""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig, mixin
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from finetune.backend.axes import Axes
from finetune.distributed.parameters import unsharded_shape
from finetune.errors import FinetuneError
from finetune.planner.schedules import parts_of, spans
from finetune.process.attributes import changed

PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style of replicated parameters whose gradients are partial sums."""
NAMES = (
    "initialize_distributed_mesh",
    "apply_pipeline_parallelism",
    "apply_tensor_parallelism",
    "apply_fully_sharded_data_parallelism",
)
"""Names in `transformers.distributed.mixin` (5.23) that are replaced while a model is divided."""


NAMED = {
    "pipeline": "pp",
    "replicate": "dp_replicate",
    "shard": "fsdp",
    "sequence": "sp",
    "tensor": "tp",
}
"""Axis of a plan's mesh -> its name for transformers and PEFT."""


EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes of the expert mesh: `efsdp` x `ep` are the processes of `fsdp` x `tp`."""


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Device meshes of the layers and, if experts are divided separately, of the experts.

    Replaces transformers' own mesh.
    """

    layers: DeviceMesh
    experts: DeviceMesh | None = None

    def get_mesh(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        words = (axes,) if isinstance(axes, str) else axes
        if self.experts is not None and not {"ep", "efsdp"}.isdisjoint(words):
            return self.experts[axes]
        return self.layers[axes]


@contextlib.contextmanager
def dividing(meshes: Meshes, device: torch.device, axes: Axes) -> Iterator[dict[str, Any]]:
    """Context in which `from_pretrained` with the yielded arguments loads only the local part.

    It replaces three behaviors of transformers 5.23: building its own mesh without other axes,
    summing partial gradients after each micro-batch, and sharding before an adapter is attached.

    Raises:
        FinetuneError: this version of transformers lacks one of `NAMES`.
    """
    lost = [name for name in NAMES if not hasattr(mixin, name)]
    if lost:
        raise FinetuneError(
            f"transformers {transformers.__version__}: transformers.distributed.mixin has no "
            f"{', '.join(lost)}, which dividing a model ({axes.words()}) needs; use a "
            "version that has it (5.23), or fsdp_full_shard"
        )
    replaced: dict[str, Callable[..., Any]] = {
        "initialize_distributed_mesh": lambda _: (device, meshes),
        "apply_pipeline_parallelism": lambda model, along: _stages(model, along, axes),
        "apply_tensor_parallelism": functools.partial(_tensor, mixin.apply_tensor_parallelism),
        "apply_fully_sharded_data_parallelism": lambda model, *_: model,
    }
    with changed(mixin, **replaced):
        if not _divides(axes):
            yield {}
            return
        sizes = {"tp_size": axes.tensor, "pp_size": axes.pipeline, "ep_size": axes.experts}
        if axes.experts > 1:
            sizes["fsdp_size"] = meshes.layers["fsdp"].size()
        yield {"distributed_config": DistributedConfig(**sizes)}


def _divides(axes: Axes) -> bool:
    """Whether weights are divided between processes before FSDP2."""
    return axes.tensor * axes.pipeline * axes.experts > 1


def divide(model: Any, meshes: Meshes, device: torch.device, axes: Axes) -> nn.Module:
    """The local part of a model that was built complete, on this process's device."""
    if not _divides(axes):
        return model.to(device)
    with dividing(meshes, device, axes) as words:
        config, _, given = model.prepare_distribute_model(words["distributed_config"])
        model = model.maybe_distribute_model(model, config, given)
    head = model.get_output_embeddings()
    if head is not None and not is_elsewhere(head):
        model.tie_weights()
    return model.to(device)


def _tensor(
    apply: Callable[..., Any], model: PreTrainedModel, along: DeviceMesh, plan: dict[str, str]
) -> PreTrainedModel:
    """Divide layers with transformers, without its hooks that sum partial gradients."""
    modules = {name for name, module in model.named_modules() if not is_elsewhere(module)}
    # If embeddings are already tied, the head's name is not a separate parameter.
    known = modules | {name for name, _ in model.named_parameters()}
    here = {name: style for name, style in plan.items() if name in known}
    kept = {name: style for name, style in here.items() if style != PARTIAL}
    found: Any = apply(model, along, kept)
    found._partial_gradients = tuple(
        name for name, style in here.items() if style == PARTIAL and name in modules
    )
    return found


class _Owner:
    """Tells transformers' loader which weights this stage reads."""

    def __init__(self, stage: int, mine: set[int], first: bool, last: bool, tied: bool) -> None:
        self.pp_rank, self.mine = stage, mine
        self.table, self.last = first or (tied and last), last

    def find_rank_for_key(self, key: str, _: int, prefix: str) -> int:
        """This stage's rank if it holds the weight, otherwise -1."""
        if key.startswith(f"{prefix}.layers."):
            is_local = int(key.removeprefix(f"{prefix}.layers.").split(".")[0]) in self.mine
        elif key.startswith(f"{prefix}.embed_tokens."):
            is_local = self.table
        else:
            is_local = self.last
        return self.pp_rank if is_local else -1


def _stages(model: Any, along: DeviceMesh, axes: Axes) -> PreTrainedModel:
    """Keep only the layers of this process's stages, under their original indices."""
    vars(model)["_complete"] = _without_values(model)
    stage = along.get_local_rank()
    chunks = parts_of(stage, axes)
    base = getattr(model, model.base_model_prefix)
    parts = spans(len(base.layers), axes)
    mine = {layer for chunk in chunks for layer in parts[chunk]}
    first, last = 0 in chunks, len(parts) - 1 in chunks
    tied = bool(model.config.tie_word_embeddings)
    for index in range(len(base.layers)):
        if index not in mine:
            base.layers[index] = PipelineIdentityLayer()
    if not (first or (tied and last)):
        base.embed_tokens = PipelineIdentityLayer()
    if not last:
        base.norm = PipelineIdentityLayer()
        model.lm_head = PipelineIdentityLayer()
        if tied:
            model.all_tied_weights_keys = {}
    model._pp_stage = _Owner(stage, mine, first, last, tied)
    return model


def _without_values(model: Any) -> PreTrainedModel:
    """A copy of a model on the meta device, outside of its mesh."""
    memo: dict[int, Any] = {id(model._mesh_manager): None, id(model._device_mesh): None}
    memo |= {id(each): each.to("meta") for each in model.buffers()}
    real = [p for p in model.parameters() if not p.is_meta]
    memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in real}
    found = copy.deepcopy(model, memo)
    found.tie_weights()  # transformers ties tables after they are loaded
    return found


def complete(model: nn.Module) -> Any:
    """The model of all stages, without values and with the same adapter; without stages, `model`.

    Names, shapes and settings are those of this model, so that every stage finds the same problems.
    """
    known = (vars(each)["_complete"] for each in model.modules() if "_complete" in vars(each))
    return next(known, model)


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every trained parameter of all stages, by name."""
    named = complete(model).named_parameters()
    return {name: tuple(unsharded_shape(p)) for name, p in named if p.requires_grad}


def is_elsewhere(module: nn.Module | None) -> bool:
    """Whether a placeholder replaces the module, because another stage has it."""
    return isinstance(module, PipelineIdentityLayer)


def network_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter's wrapper."""
    return next(each for each in model.modules() if isinstance(each, PreTrainedModel))


def partial_gradients(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose gradients are partial sums on each tensor-parallel process."""
    network = network_of(model)
    modules = vars(network).get("_partial_gradients", ())
    found = {id(p) for name in modules for p in network.get_submodule(name).parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) in found)


def forget(model: nn.Module) -> None:
    """Remove transformers' `distributed_config` from the config that is saved."""
    network = network_of(model)
    vars(network.config).pop("distributed_config", None)


def experts_of(block: nn.Module) -> list[nn.Module]:
    """Modules with a part of a layer's experts, by transformers' mark."""
    return [each for each in block.modules() if vars(each).get("_is_expert_parallel")]


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that have parameters, also inside an adapter's wrapper."""
    for name, module in model.named_modules():
        if re.fullmatch(r"(?:.*\.)?layers\.\d+", name) and any(True for _ in module.parameters()):
            yield module
