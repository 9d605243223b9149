"""Cut a model along a mesh while transformers loads it, so that a process reads its part alone."""

import contextlib
import dataclasses
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
from finetune.errors import FinetuneError
from finetune.planner.schedules import parts_of, spans

PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style of parameters whose gradient each process has a part of."""
NAMES = (
    "initialize_distributed_mesh",
    "apply_pipeline_parallelism",
    "apply_tensor_parallelism",
    "apply_fully_sharded_data_parallelism",
)
"""Names of `transformers.distributed.mixin` (5.23) that are replaced while a model is cut."""


NAMED = {
    "pipeline": "pp",
    "replicate": "dp_replicate",
    "shard": "fsdp",
    "sequence": "sp",
    "tensor": "tp",
}
"""Axis of a plan's mesh -> its name for transformers and PEFT."""


EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes of the mesh of experts: `efsdp` x `ep` are the processes of `fsdp` x `tp`."""


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The processes of a job along the axes of its layers, and of its experts where they lie apart.

    It answers what transformers asks its own mesh for.
    """

    layers: DeviceMesh
    experts: DeviceMesh | None = None

    def get_mesh(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        words = (axes,) if isinstance(axes, str) else axes
        if self.experts is not None and not {"ep", "efsdp"}.isdisjoint(words):
            return self.experts[axes]
        return self.layers[axes]


@contextlib.contextmanager
def cutting(meshes: Meshes, device: torch.device, axes: Axes) -> Iterator[dict[str, Any]]:
    """Inside, `from_pretrained` with the yielded words loads this process's part alone.

    transformers 5.23 builds a mesh of all processes for itself, which knows no other axes, sums
    partial gradients after each micro-batch, and shards before there is an adapter: all replaced.

    Raises:
        FinetuneError: this version of transformers has no such names.
    """
    lost = [name for name in NAMES if not hasattr(mixin, name)]
    if lost:
        raise FinetuneError(
            f"transformers {transformers.__version__}: transformers.distributed.mixin has no "
            f"{', '.join(lost)}, by which models are divided ({axes.words()}); use a version that "
            "has it (5.23), or fsdp_full_shard"
        )
    before = {name: getattr(mixin, name) for name in NAMES}

    def tensor(model: PreTrainedModel, along: DeviceMesh, plan: dict[str, str]) -> PreTrainedModel:
        return _tensor(before["apply_tensor_parallelism"], model, along, plan)

    replaced: dict[str, Callable[..., Any]] = {
        "initialize_distributed_mesh": lambda _: (device, meshes),
        "apply_pipeline_parallelism": lambda model, along: _stages(model, along, axes),
        "apply_tensor_parallelism": tensor,
        "apply_fully_sharded_data_parallelism": lambda model, *_: model,
    }
    for name, function in replaced.items():
        setattr(mixin, name, function)
    try:
        if not _cuts(axes):
            yield {}
            return
        sizes = {"tp_size": axes.tensor, "pp_size": axes.pipeline, "ep_size": axes.experts}
        if axes.experts > 1:
            sizes["fsdp_size"] = meshes.layers["fsdp"].size()
        yield {"distributed_config": DistributedConfig(**sizes)}
    finally:
        for name, function in before.items():
            setattr(mixin, name, function)


def _cuts(axes: Axes) -> bool:
    """Whether a process holds a part of some weights, before FSDP2."""
    return axes.tensor * axes.pipeline * axes.experts > 1


def cut(model: Any, meshes: Meshes, device: torch.device, axes: Axes) -> nn.Module:
    """What this process holds of a model that was built complete, on its device."""
    if not _cuts(axes):
        return model.to(device)
    with cutting(meshes, device, axes) as words:
        config, _, given = model.prepare_distribute_model(words["distributed_config"])
        model = model.maybe_distribute_model(model, config, given)
    if model.get_output_embeddings() is not None and not is_elsewhere(
        model.get_output_embeddings()
    ):
        model.tie_weights()
    return model.to(device)


def _tensor(
    apply: Callable[..., Any], model: PreTrainedModel, along: DeviceMesh, plan: dict[str, str]
) -> PreTrainedModel:
    """Cut layers by transformers, but for hooks that sum gradients."""
    elsewhere = [n for n, m in model.named_modules() if isinstance(m, PipelineIdentityLayer)]
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    here = {  # of a tied table that is tied already, the head's name is no other parameter
        name: style
        for name, style in plan.items()
        if name in known
        and not any(name == each or name.startswith(f"{each}.") for each in elsewhere)
    }
    kept = {name: style for name, style in here.items() if style != PARTIAL}
    found: Any = apply(model, along, kept)
    modules = {name for name, _ in model.named_modules()}
    found._partial_gradients = tuple(
        name for name, style in here.items() if style == PARTIAL and name in modules
    )
    return found


class _Owner:
    """Answers transformers' loader which weights this stage reads; others are passed over."""

    def __init__(self, stage: int, mine: set[int], first: bool, last: bool, tied: bool) -> None:
        self.pp_rank, self.mine = stage, mine
        self.table, self.last = first or (tied and last), last

    def find_rank_for_key(self, key: str, _: int, prefix: str) -> int:
        """This stage's number where it holds a weight, another where it does not."""
        if key.startswith(f"{prefix}.layers."):
            held = int(key.removeprefix(f"{prefix}.layers.").split(".")[0]) in self.mine
        elif key.startswith(f"{prefix}.embed_tokens."):
            held = self.table
        else:
            held = self.last
        return self.pp_rank if held else -1


def _stages(model: Any, along: DeviceMesh, axes: Axes) -> PreTrainedModel:
    """Leave on this process the layers of its stages, under their numbers."""
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


def is_elsewhere(module: nn.Module | None) -> bool:
    """Whether another stage has what stood in this module's place."""
    return isinstance(module, PipelineIdentityLayer)


def network_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers, within what an adapter puts round it."""
    return next(each for each in model.modules() if isinstance(each, PreTrainedModel))


def partial_gradients(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose gradient each tensor parallel process has a part of."""
    network = network_of(model)
    modules = vars(network).get("_partial_gradients", ())
    found = {id(p) for name in modules for p in network.get_submodule(name).parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) in found)


def forget(model: nn.Module) -> None:
    """Leave what transformers noted of the cutting out of the config that is saved."""
    network = network_of(model)
    vars(network.config).pop("distributed_config", None)


def experts_of(block: nn.Module) -> list[nn.Module]:
    """Modules that hold some of the experts of a layer, as transformers marks them."""
    return [each for each in block.modules() if vars(each).get("_is_expert_parallel")]


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that have parameters, with or without an adapter round it."""
    for name, module in model.named_modules():
        if re.fullmatch(r"(?:.*\.)?layers\.\d+", name) and any(True for _ in module.parameters()):
            yield module
