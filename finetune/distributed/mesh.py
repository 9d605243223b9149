"""Engine for a model divided over a mesh: tensor and pipeline parallelism, with FSDP2 over data.

transformers divides the layers while it loads them, torch's FSDP2 shards the rest, and Accelerate
provides the launch, the device, the optimizers and gradient clipping. Accelerate's own `prepare`
supports neither pipeline nor expert parallelism, and its tensor parallelism needs a class that
transformers 5.23 no longer has.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig

from finetune.data.rows.collate import MicroBatch
from finetune.distributed import complete, context, layers, sequence
from finetune.distributed.boxes import Box
from finetune.distributed.filling import padded
from finetune.distributed.fragments import Fragment
from finetune.distributed.layers import NAMED
from finetune.distributed.parameters import local
from finetune.distributed.plan_differences import DIVIDED, Compare
from finetune.distributed.reader import Reader
from finetune.distributed.unsharded import Native
from finetune.planner import mesh_rules
from finetune.planner.mesh import AXES
from finetune.process.quiet import mesh_kept_from_accelerate

AXIS = {name: axis for axis, name in NAMED.items()}
ROWS = "fsdp_sp"
"""Name of the flattened axis that shards over both `fsdp` and `sp`."""
COVERED = {ROWS: {"shard", "sequence"}, "ep": {"shard", "tensor"}, "efsdp": {"shard", "tensor"}}
"""Axes of a plan's mesh that a torch axis covers, if not just the axis of the same name."""

Block = tuple[bool, tuple[int, ...]]
"""Whether this process writes its part of a parameter, and the offsets of the part."""


class MeshEngine(Native):
    """Engine of processes along named axes, each with a part of the model."""

    kinds = frozenset({DistributedType.MULTI_GPU, DistributedType.MULTI_CPU})
    widens = True
    """Whether FSDP2 casts the bf16 output of the outermost module to fp32."""

    def __init__(self, *words: Any, **named: Any) -> None:
        with mesh_kept_from_accelerate():
            super().__init__(*words, **named)
        self.mesh: DeviceMesh = init_device_mesh(
            self.device.type, self.plan.mesh.sizes, mesh_dim_names=tuple(NAMED[a] for a in AXES)
        )
        self.meshes = layers.Meshes(self.mesh, self._expert_mesh())
        self.place = self.plan.mesh.place(self.rank)
        self.partial: frozenset[str] = frozenset()
        """Names of parameters whose gradients are partial sums on each tensor-parallel process."""

    def _expert_mesh(self) -> DeviceMesh | None:
        """Mesh of the same processes by their experts; None if experts are not divided."""
        mesh = self.plan.mesh
        if mesh.experts == 1:
            return None
        sizes = (mesh.pipeline, mesh.replicate, mesh.expert_copies, mesh.experts)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=layers.EXPERTS)

    @property
    def averaged(self) -> int:
        return self.data_world * self.plan.mesh.sequence

    @property
    def counts(self) -> bool:
        return self.place["tensor"] == 0

    @property
    def writes_unsharded(self) -> bool:
        return not any(at for axis, at in self.place.items() if axis != "pipeline")

    # The model -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
        axes = mesh_rules.axes_of(self.plan.backend.axes, config.to_dict())
        with layers.dividing(self.meshes, self.device, axes) as words:
            yield words

    def divide(self, model: nn.Module) -> nn.Module:
        return layers.divide(model, self.meshes, self.device, self.plan.backend.axes)

    def attention(self, config: PreTrainedConfig, core: str) -> str:
        if self.plan.mesh.sequence == 1:
            return core
        group = self.mesh.get_group("sp")
        if self.plan.backend.axes.context > 1:
            return context.register(group, self.plan.backend.axes.rotation)
        return sequence.register(config, core, group, self.plan.mesh.tensor)

    def local_batches(self, batches: list[MicroBatch], pad_id: int) -> list[MicroBatch]:
        ways = self.plan.mesh.sequence
        if ways == 1:
            return batches
        rank, group = self.place["sequence"], self.mesh.get_group("sp")
        filled = [padded([batch], pad_id, ways)[0] for batch in batches]
        return [sequence.part(batch, rank, ways, group) for batch in filled]

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        # `fully_shard` puts new parameters in the place of these; optimizers find theirs by name.
        names = {id(p): name for name, p in model.named_parameters()}
        self.partial = layers.partial_gradients(model)
        self._share_balance(layers.network_of(model))
        layers.forget(model)
        self._shard(model)
        now = dict(model.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now[names[id(p)]] for p in group["params"]]
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in _by_mesh(group)
            ]
        # Autocast as in other engines, unless FSDP2's policy casts.
        self.model = model if self.averaged > 1 else self._autocast(model)
        # There is no wrapper class by which `wrapped_by` could recognize the engine.
        vars(self.model)[DIVIDED] = True
        self.optimizers = [
            self.accelerator.prepare_optimizer(each, device_placement=False) for each in optimizers
        ]

    def _share_balance(self, network: Any) -> None:
        """Let processes that share a row compute the load-balancing loss of complete documents."""
        if self.plan.mesh.sequence > 1 and network.balance is not None:
            group = self.mesh.get_group("sp")
            network.balance = dataclasses.replace(network.balance, group=group)

    def _autocast(self, model: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def _shard(self, model: nn.Module) -> None:
        """Shard each block, then the rest, over the data and sequence axes."""
        if self.averaged == 1:
            return
        both = self.plan.mesh.replicate > 1
        over = self.mesh["dp_replicate", "fsdp"] if both else self.mesh["fsdp"]
        if self.plan.mesh.sequence > 1:
            # Processes that share a row hold equal weights too, and gradients of different tokens.
            over = self.mesh["fsdp", "sp"]._flatten(ROWS)
        policy = MixedPrecisionPolicy()
        if self.plan.backend.precision == "bf16":
            inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            wide = torch.float32 if self.widens else None
            # A stage gets hidden states in 16 bits, and sums of routers that must stay in fp32.
            policy = dataclasses.replace(inner, output_dtype=wide, cast_forward_inputs=self.widens)
        else:
            inner = policy
        # From the inside out: a unit takes the parameters that no unit inside of it has taken.
        for block in layers.blocks(model):
            for experts in layers.experts_of(block):
                self._shard_experts(experts, inner)
            fully_shard(block, mesh=over, mp_policy=inner)
        for root in self._roots(model):
            fully_shard(root, mesh=over, mp_policy=policy)

    def _shard_experts(self, experts: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Shard a layer's experts over the processes that hold the same experts.

        Their gradient covers the tokens of all processes with other experts too, so the sum over
        copies is divided by `averaged`, like every other gradient.
        """
        over = self.meshes.get_mesh("efsdp")
        if self.plan.mesh.replicate > 1:
            over = self.meshes.get_mesh(("dp_replicate", "efsdp"))
        # Inputs are not cast, so that routing weights keep their type.
        kept = dataclasses.replace(policy, cast_forward_inputs=False)
        module = fully_shard(experts, mesh=over, mp_policy=kept)
        module.set_gradient_divide_factor(float(self.averaged))
        if self.plan.mesh.expert_copies > 1:  # only NCCL can divide a sum itself
            module.set_force_sum_reduction_for_comms(True)

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        """Modules whose forward pass is called from outside of the model."""
        return [model]

    def compare_wrapped(self, compare: Compare) -> None:
        """Compare the mesh axes of the parameters with the plan."""
        mesh = self.plan.mesh
        cut = {"tp"} if mesh.tensor > 1 else set[str]()
        cut |= {"fsdp" if mesh.sequence == 1 else ROWS} if self.averaged > 1 else set[str]()
        cut |= {"dp_replicate"} if mesh.replicate > 1 else set[str]()
        cut |= {"ep"} if mesh.experts > 1 else set[str]()
        cut |= {"efsdp"} if mesh.experts > 1 and self.averaged > 1 else set[str]()
        found = set[str]()
        for _, parameter in self.module.named_parameters():
            if isinstance(parameter.data, DTensor):
                found |= set(parameter.data.device_mesh.mesh_dim_names or ())
        compare("axes of the parameters", sorted(cut), sorted(found))

    # A step --------------------------------------------------------------------------------------

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                reduced = last or self.plan.synchronises_each
                module.set_requires_gradient_sync(reduced, recurse=False)
                module.set_requires_all_reduce(last, recurse=False)
        return contextlib.nullcontext()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def gathered(self, blank: nn.Module | None = None) -> Iterator[nn.Module]:
        """Every process has all values in `blank`, computes with autocast, and frees them."""
        assert blank is not None
        # `filled` asks each process for its shards, which a forward pass may have left gathered.
        self.reshard()
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = types.get(self.plan.backend.precision, torch.float32)
        with (
            complete.filled(blank, self.module, self._stages_of_tensors(), dtype),
            torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32),
        ):
            yield blank

    def _stages_of_tensors(self) -> complete.Stages | None:
        """The stages of this process's pipeline, with the types of their tensors."""
        if self.plan.mesh.pipeline == 1:
            return None
        ranks = self.gather(complete.dtypes(self.module))
        each = len(ranks) // self.plan.mesh.pipeline  # stages are the outermost axis
        mine = self.place["pipeline"]
        return complete.Stages(self.mesh.get_group("pp"), mine, self.device, ranks[::each])

    def clip(self) -> torch.Tensor:
        """Clip by the norm over all mesh axes, in which each element counts once."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.grad is not None]
        # First, because the norm is that of complete gradients.
        self._sum_partial(named)
        square = self._square([p for _, p in named])
        norm = square.sqrt()
        limit = self.plan.recipe.optim.max_grad_norm
        if limit is not None:
            # As torch's `clip_grad_norm_` does, so that other engines clip alike.
            factor = float(limit / (norm + 1e-6))
            if factor < 1.0:
                for _, parameter in named:
                    local(parameter.grad).mul_(factor)
        return norm.float()

    def _sum_partial(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Sum partial gradients over the tensor-parallel processes, once per step.

        transformers 5.23 would sum the accumulated gradient after every micro-batch, which would
        count earlier micro-batches several times.
        """
        for name, parameter in named:
            if name in self.partial:
                torch.distributed.all_reduce(local(parameter.grad), group=self.mesh.get_group("tp"))

    def _square(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """Squared norm of the gradients of this process's stage, an fp64 scalar."""
        if not parameters:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        # Without a limit, it only measures.
        norm = self.accelerator.clip_grad_norm_(parameters, float("inf"))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # In fp64, because a pipeline adds the squares of its stages.
        return norm.double() ** 2

    # Checkpoints ---------------------------------------------------------------------------------

    def written(
        self, name: str, parameter: nn.Parameter, values: dict[str, torch.Tensor]
    ) -> Fragment:
        first = next(iter(values.values()))
        shape = None if first.shape == parameter.shape else tuple(first.shape)
        writes, offsets = self.block(first if shape else parameter)
        blocks = {key: local(value).detach() for key, value in values.items()} if writes else {}
        return Fragment(name, 0, blocks, offsets=offsets, shape=shape)

    def part(
        self, reader: Reader, name: str, key: str, parameter: nn.Parameter, made: torch.Tensor
    ) -> torch.Tensor:
        return reader.box(name, key, Box(self.block(made)[1], tuple(local(made).shape)))

    def block(self, tensor: torch.Tensor) -> Block:
        """Whether this process writes its part of a tensor, and the offsets of the part.

        Among processes with the same part, the first along the replicated axes writes it.
        """
        data = tensor.data
        replicated, offsets = set(AXES) - {"pipeline"}, (0,) * data.dim()
        if isinstance(data, DTensor):
            mesh = data.device_mesh
            named = zip(mesh.mesh_dim_names or (), data.placements, strict=True)
            for name, where in named:
                if not where.is_replicate():
                    replicated -= COVERED.get(name) or {AXIS[name]}
            _, offsets = compute_local_shape_and_global_offset(data.shape, mesh, data.placements)
        # A dimension that is shorter than the mesh leaves some processes without elements.
        empty = not local(data).numel()
        return not empty and not any(self.place[axis] for axis in replicated), tuple(offsets)


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a parameter group of an optimizer by device mesh.

    torch 2.13's fused AdamW supports neither a mix of DTensors and plain tensors nor two meshes.
    """
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        data = parameter.data
        mesh = data.device_mesh if isinstance(data, DTensor) else None
        parts.setdefault(mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in parts.values()]
