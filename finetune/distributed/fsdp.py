"""FSDP2 and HSDP: parameters, gradients and optimizer state sharded along the first dimension."""

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.distributed.device import on_cpu
from finetune.distributed.gloo_shared_memory import share_memory
from finetune.distributed.plan_differences import Compare
from finetune.distributed.unsharded import Native
from finetune.planner.mesh import Mesh


class Fsdp(Native):
    """FSDP2, through Accelerate."""

    kinds = frozenset({DistributedType.FSDP})

    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        cpu, group = on_cpu(), InitProcessGroupKwargs(timeout=timeout)
        # Before Accelerator is built: it takes over the type that the state has by then.
        if cpu:
            select_fsdp_on_cpu(group)
        given = {"cpu": cpu, "fsdp_plugin": self._fsdp_plugin(cpu), "kwargs_handlers": [group]}
        mesh = self.plan.mesh
        if self.plan.backend.shard_size is not None:
            given["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=mesh.replicate, dp_shard_size=mesh.shard
            )
        return given

    def _fsdp_plugin(self, cpu: bool) -> FullyShardedDataParallelPlugin:
        backend = self.plan.backend
        policy = None
        if backend.precision != "fp32":
            narrow = torch.float16 if backend.precision == "fp16" else torch.bfloat16
            # Accelerate's default would reduce gradients in 16 bits and return 16-bit logits.
            policy = MixedPrecisionPolicy(
                param_dtype=narrow, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=backend.shard == "params",
            # Pinned memory does not exist without an accelerator.
            cpu_offload=CPUOffloadPolicy(pin_memory=not cpu) if backend.offload == "all" else False,
            mixed_precision_policy=policy,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )

    def compare_built(self, compare: Compare) -> None:
        backend, fsdp = self.plan.backend, self.accelerator.state.fsdp_plugin
        compare("fsdp_version", 2, fsdp.fsdp_version)
        compare("reshard_after_forward", backend.shard == "params", fsdp.reshard_after_forward)
        compare("offload", backend.offload == "all", isinstance(fsdp.cpu_offload, CPUOffloadPolicy))

    def compare_wrapped(self, compare: Compare) -> None:
        """Compare FSDP2's state of each module, which torch 2.13 keeps in private attributes.

        Accelerate 1.15 keeps modules outside of blocks, such as the head, gathered from forward to
        backward, so `reshard_after_forward` is compared for blocks only.
        """
        model, backend = self.model, self.plan.backend
        blocks = {
            block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each
        }
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        compare("parameters that are not sharded", [], whole[:3])
        for name, module in _units(model):
            group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
            if group is None:  # all of its parameters belong to inner FSDP modules
                continue
            place = f"of {name or 'the model'}"
            compare(f"mesh {place}", self.plan.mesh, _mesh_of(group.mesh_info))
            reshards = group.post_forward_mesh_info is not None
            if module in blocks:
                compare(f"reshard_after_forward {place}", backend.shard == "params", reshards)
            if module is not model:
                output = module._get_fsdp_state()._mp_policy.output_dtype
                compare(f"output type {place}", None, output)
            offloaded = isinstance(group.offload_policy, CPUOffloadPolicy)
            compare(f"offload {place}", backend.offload == "all", offloaded)

    def prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        super().prepare(model, optimizers)
        if self.device.type == "cpu" and self.world > 1:
            several = self.plan.mesh.replicate > 1
            mesh = self.accelerator.torch_device_mesh
            copy = mesh["dp_shard"].get_group() if several and mesh is not None else None
            reason = share_memory(self.model, copy)
            if reason is not None:
                self.notes.append(f"FSDP's weights and gradients go over gloo, because {reason}")

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._name_units(model)
        if self.plan.widens_shards:
            with _nothing_trained(model):  # Accelerate 1.15 converts trained parameters to fp32
                super().wrap(model, optimizers)
            # Now each process converts its shard only, not the complete weights.
            self.model.float()
        else:
            super().wrap(model, optimizers)
        _move_scales(self.model, self.device)
        _keep_compute_type_between_units(self.model)

    def wrap_model(self, model: nn.Module) -> None:
        self._name_units(model)
        self.model = fsdp2_prepare_model(self.accelerator, model)
        _keep_compute_type_between_units(self.model)

    def _name_units(self, model: nn.Module) -> None:
        """Let FSDP2 wrap only those block classes that the model contains, by names that it reads.

        Accelerate 1.15 raises an error if transformers names a class that is missing: Gemma 3 has
        only the vision part of SigLIP, but the block of its text part is named too.
        """
        there = {type(module).__name__ for module in model.modules()}
        teachers = [each for name, each in model.named_modules() if name.endswith("teacher")]
        named = {
            name
            for each in (model, *teachers)
            for name in getattr(each, "_no_split_modules", None) or ()
        }
        if named & there and (named - there or teachers):
            plugin = self.accelerator.state.fsdp_plugin
            plugin.transformer_cls_names_to_wrap = sorted(named & there)

    def gather_frozen_units(self) -> None:
        """Gather each completely frozen unit once.

        A unit that no forward pass enters (the vision tower of a model that reads text) otherwise
        lacks state that torch 2.13 accesses after a backward pass with accumulation.
        """
        for _, module in _units(self.model):
            group = module._get_fsdp_state()._fsdp_param_group
            params = [] if group is None else group.fsdp_params
            if params and not any(each.sharded_param.requires_grad for each in params):
                module.unshard()
                module.reshard()

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce each micro-batch if the plan says so; all-reduce replicas at the last."""
        if self.plan.mesh.replicate > 1:
            # Whatever happens inside a copy, copies exchange only the sum of a step.
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_all_reduce(last)
        if last or self.plan.synchronises_each:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def reshard(self) -> None:
        """Reshard all units (torch 2.13).

        The outermost module, and with SHARD_GRAD_OP every module, would otherwise expose unsharded
        bf16 parameters instead of the fp32 shards that are trained and saved.
        """
        for _, module in _units(self.model):
            module.reshard()

    @contextlib.contextmanager
    def gathered(self, blank: nn.Module | None = None) -> Iterator[nn.Module]:
        """Every unit is unsharded once, and stays unsharded between forward passes (torch 2.13)."""
        units = [module for _, module in _units(self.model)]
        groups = [module._get_fsdp_state()._fsdp_param_group for module in units]
        usual = [group is not None and group.post_forward_mesh_info is not None for group in groups]
        for module in units:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield self.module
        finally:
            for module, reshards in zip(units, usual, strict=True):
                module.set_reshard_after_forward(reshards, recurse=False)
            self.reshard()

    def copies(self) -> tuple[int, int]:
        mesh = self.plan.mesh
        return mesh.replicate, mesh.place(self.rank)["replicate"]

    def first_row(self, parameter: nn.Parameter) -> int:
        """FSDP2 shards the first dimension."""
        data = parameter.data
        if not isinstance(data, DTensor):
            return 0
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, data.device_mesh, data.placements
        )
        return offsets[0]


def _mesh_of(info: Any) -> Mesh:
    """The mesh of an FSDP2 unit (torch 2.13): one axis shards, a second one replicates."""
    replicate = info.replicate_mesh_size if isinstance(info, HSDPMeshInfo) else 1
    return Mesh(replicate=replicate, shard=info.shard_mesh_size)


def select_fsdp_on_cpu(group: InitProcessGroupKwargs) -> None:
    """Make Accelerate choose FSDP on a machine without an accelerator.

    Accelerate 1.15 promotes only MULTI_GPU to FSDP, and silently trains MULTI_CPU with plain DDP.
    With the type set to MULTI_GPU, its FSDP branch runs over gloo.
    """
    state = PartialState(cpu=True, **group.to_kwargs())
    state.distributed_type = DistributedType.MULTI_GPU


def _units(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


@contextlib.contextmanager
def _nothing_trained(model: nn.Module) -> Iterator[None]:
    """Context in which no parameter of a model, which is sharded in place, is trained."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # No `finally`: a model that could not be sharded is not used again.
    model.requires_grad_(False)
    yield
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _move_scales(model: nn.Module, device: torch.device) -> None:
    """Move the scales of 4-bit weights to the compute device: FSDP2 moves only parameters."""
    for module in model.modules():
        scales = getattr(module, "quant_state", None)  # of bitsandbytes' layers only
        if scales is not None:
            scales.to(device)


def _keep_compute_type_between_units(model: nn.Module) -> None:
    """Let FSDP2 units return their compute type; only the outermost module returns fp32.

    Accelerate 1.15 gives each unit the policy of the model: the bf16 output of a block is cast to
    fp32 and back in the next block, likewise for its gradient, which gains no precision.
    """
    for _, module in _units(model):
        if module is not model:
            state = module._get_fsdp_state()
            state._mp_policy = dataclasses.replace(state._mp_policy, output_dtype=None)
