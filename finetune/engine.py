"""The engine that Accelerate builds for a plan: made, read back, and driven one step at a time.

Everything here that works round a library names its version and reason. On a machine without an
accelerator every backend runs for real over gloo, with the same configuration files.
"""

import contextlib
import dataclasses
import datetime
import gc
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.ops import require_async_io
from finetune.planner import Plan

ENGINE_TYPES = {
    "single": {DistributedType.NO},
    "ddp": {DistributedType.MULTI_GPU, DistributedType.MULTI_CPU},
    "fsdp": {DistributedType.FSDP},
    "deepspeed": {DistributedType.DEEPSPEED},
}


@dataclasses.dataclass(frozen=True)
class Held:
    """Elements that one rank holds between steps (gradients: just before the optimizer's step)."""

    parameters: int
    gradients: int
    optimizer: int
    """Elements of the first moment in memory (none while it lies on a disk)."""


class Engine:
    """One process's end of the job: the accelerator, the model, and how a step is taken."""

    def __init__(self, plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> None:
        self.plan = plan
        cpu = not torch.accelerator.is_available()
        if attempt := backends.restarts():
            _meet_apart_from_earlier_attempts(attempt)
        self.accelerator = _accelerator(plan, nvme_path, timeout, cpu)
        self.model: nn.Module = nn.Module()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.held_gradients = 0
        _refuse_difference(plan, self.accelerator)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def speaks(self) -> bool:
        """Whether this rank talks to the person and writes the record."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def deepspeed(self) -> bool:
        return self.plan.backend.engine == "deepspeed"

    @property
    def module(self) -> nn.Module:
        """The model without what the engine wrapped round it."""
        wrapped = self.plan.backend.engine in ("ddp", "deepspeed")
        return self.model.module if wrapped else self.model

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters by name, in the same order on every rank."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, ZeRO-3 does not partition a model while it is built or loaded.

        Accelerate 1.15's `zero3_init_context_manager(enable=False)` leaves transformers' own
        reference to the configuration in place, and so partitions all the same.
        """
        if not self.deepspeed:
            yield
            return
        from transformers.integrations import unset_hf_deepspeed_config

        plugin = self.accelerator.state.deepspeed_plugin
        plugin.dschf = None
        unset_hf_deepspeed_config()
        yield
        plugin.set_deepspeed_weakref()

    def prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Hand model and optimizers to Accelerate, which shards them in place."""
        self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        if self.deepspeed and self.model.gradient_clipping() != self._clip():
            raise FinetuneError(
                f"DeepSpeed clips at {self.model.gradient_clipping()}, the recipe at {self._clip()}"
            )

    def _clip(self) -> float:
        return self.plan.recipe.optim.max_grad_norm or 0.0

    def close(self) -> None:
        """Leave the job: trackers, then the process group.

        DDP's reducer must go first. Where it holds the last reference to a gloo group, torch 2.13
        joins the group's thread with Python's lock held, and that thread may wait for the lock.
        """
        if self.plan.backend.engine == "ddp":
            self.model, self.optimizers = nn.Module(), []
            self.accelerator.free_memory()
            gc.collect()
        self.accelerator.end_training()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch; ranks meet at the last one of a step.

        The loss must already carry world x accumulation / terms: every engine divides by both.
        """
        if self.deepspeed:  # `accelerator.backward` would also take the optimizer's step
            self.model.set_gradient_accumulation_boundary(is_boundary=last)
            self.model.backward(loss)
            return
        self.accelerator.gradient_state._set_sync_gradients(last)
        self.accelerator.backward(loss)

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, forward and backward of a micro-batch that is not the last keep to this rank."""
        if last or self.deepspeed or self.plan.backend.engine == "single":
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def reshard(self) -> None:
        """Give back what forward passes without a backward pass left gathered (FSDP2, torch 2.13).

        The outermost module, and with SHARD_GRAD_OP every module, would else show whole parameters
        in bf16 in place of the fp32 shards that are trained and saved.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, update, and clear the gradients.

        Returns the norm before clipping, and whether the update was made: a gradient that is not
        finite is dropped, on every rank alike, because its norm is that of the whole job.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        if not self.held_gradients:
            self.held_gradients = self._gradient_elements()
        if self.deepspeed:
            # DeepSpeed 0.19 drops such a gradient by itself, in every stage and precision.
            self.model.step()
            return float(self.model.get_global_grad_norm()), not self.model.optimizer.overflow
        norm = float(self.clip())
        taken = math.isfinite(norm)
        self.update(taken)
        return norm, taken

    def clip(self) -> torch.Tensor:
        """Clip the gradients of an engine that does not by itself; their norm before, a scalar."""
        limit = self.plan.recipe.optim.max_grad_norm
        bound = float("inf") if limit is None else limit
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), bound)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def update(self, taken: bool) -> None:
        """Let the optimizers use the gradients, or not, and clear them."""
        for optimizer in self.optimizers:
            if taken:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(tensor, "sum").tolist()

    def largest(self, values: list[int]) -> list[int]:
        """Element-wise maximum over all ranks."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.tolist()

    def held(self) -> Held:
        """What this rank holds; meaningful after the first step."""
        parameters = sum(_resident(parameter) for parameter in self.module.parameters())
        return Held(parameters, self.held_gradients, self._moment_elements())

    def _moment_elements(self) -> int:
        """Elements of the first moments: the state of one kind with the most elements."""
        totals: dict[str, int] = {}
        for optimizer in self.optimizers:
            inner = optimizer.optimizer
            state = inner.optimizer.state if self.deepspeed else inner.state
            for values in state.values():
                for key, value in values.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        totals[key] = totals.get(key, 0) + _local(value).numel()
        return max(totals.values(), default=0)

    def _gradient_elements(self) -> int:
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        whole = sum(_local(grad).numel() for grad in grads)
        if not self.deepspeed:
            return whole
        stage = self.model.zero_optimization_stage()
        return whole + _zero_gradient_elements(self.model.optimizer, stage)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resident(parameter: nn.Parameter) -> int:
    """Elements of a parameter in this rank's memory between steps."""
    partition = getattr(parameter, "ds_tensor", None)  # set by ZeRO-3 only
    if partition is None:
        return _local(parameter.data).numel()
    return max(parameter.numel(), partition.numel())  # whole while persistent, else empty


def _zero_gradient_elements(zero: Any, stage: int) -> int:
    """Elements of reduced gradients on this rank, where DeepSpeed 0.19 keeps them.

    ZeRO-1 in bf16 accumulates whole gradients in fp32. With the optimizer offloaded it is the
    gradient of the fp32 partition; else a list per group.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if isinstance(zero, BF16_Optimizer):  # ZeRO-1 in bf16 with fp32 accumulation
        return sum(flat.numel() for flat in zero.fp32_groups_gradients_flat)
    if stage == 3:
        partitions = zero.fp32_partitioned_groups_flat
    else:
        partitions = [p for group in zero.optimizer.param_groups for p in group["params"]]
    offloaded = sum(p.grad.numel() for p in partitions if p.grad is not None)
    if offloaded:
        return offloaded
    groups = [group for group in zero.averaged_gradients.values() if group is not None]
    return sum(grad.numel() for group in groups for grad in group)


def _meet_apart_from_earlier_attempts(attempt: int) -> None:
    """Give the processes of a restart keys of their own in the store of torch's agent.

    torch 2.13 counts on a new store for each restart, but the static rendezvous that Accelerate
    1.15 asks for keeps the first: a process may then read where one of the attempt before was
    listening, and both wait for ever.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function hides it
    create = rendezvous._create_c10d_store

    def apart(*words: Any, **named: Any) -> torch.distributed.Store:
        return torch.distributed.PrefixStore(f"attempt-{attempt}", create(*words, **named))

    rendezvous._create_c10d_store = apart


def _accelerator(
    plan: Plan, nvme_path: Path, timeout: datetime.timedelta, cpu: bool
) -> Accelerator:
    shared: dict[str, Any] = {
        # ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the argument, not the plugin (1.15).
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=plan.accumulation, sync_with_dataloader=False
        ),
        "mixed_precision": "bf16" if plan.backend.precision == "bf16" else "no",
    }
    if plan.backend.engine == "deepspeed":
        # Without gloo by name Accelerate 1.15 on CPU believes that each rank is alone.
        group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timeout)
        plugin = _deepspeed_plugin(plan, nvme_path, cpu)
        return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], **shared)
    group = InitProcessGroupKwargs(timeout=timeout)
    if plan.backend.engine == "fsdp":
        if cpu:
            select_fsdp_on_cpu(group)
        plugin = _fsdp_plugin(plan, cpu)
        return Accelerator(cpu=cpu, fsdp_plugin=plugin, kwargs_handlers=[group], **shared)
    return Accelerator(cpu=cpu, kwargs_handlers=[group], **shared)


def select_fsdp_on_cpu(group: InitProcessGroupKwargs) -> None:
    """Make Accelerate choose FSDP on a machine without an accelerator.

    Accelerate 1.15 promotes to FSDP from MULTI_GPU only, not from MULTI_CPU, and then trains plain
    DDP without a word. Told that it is MULTI_GPU, its own FSDP branch runs, over gloo.
    """
    state = PartialState(cpu=True, **group.to_kwargs())
    state.distributed_type = DistributedType.MULTI_GPU


def _fsdp_plugin(plan: Plan, cpu: bool) -> FullyShardedDataParallelPlugin:
    policy = None
    if plan.backend.precision == "bf16":
        # Accelerate's default reduces gradients in bf16 and returns bf16 logits.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    offload = plan.backend.offload == "all"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.backend.shard == "params",
        # Pinned memory does not exist without an accelerator.
        cpu_offload=CPUOffloadPolicy(pin_memory=not cpu) if offload else False,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )


def _deepspeed_plugin(plan: Plan, nvme_path: Path, cpu: bool) -> DeepSpeedPlugin:
    backend, recipe = plan.backend, plan.recipe
    if cpu:
        _keep_shared_memory_op_unbuilt()
    stage = next(stage for stage, shard in backends.ZERO_SHARDS.items() if shard == backend.shard)
    optimizer_device = backend.device if backend.offload != "none" else "none"
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=plan.accumulation,
        offload_optimizer_device=optimizer_device,
        offload_param_device=backend.device if backend.offload == "all" else "none",
        offload_optimizer_nvme_path=str(nvme_path),
        offload_param_nvme_path=str(nvme_path),
        zero3_init_flag=backend.zero_init,
        zero3_save_16bit_model=stage == 3,
    )
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = recipe.batch.micro_rows
    # Accelerate drops a clipping of 0 and DeepSpeed 0.19 then clips at 1.0: it is always written.
    config["gradient_clipping"] = recipe.optim.max_grad_norm or 0.0
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW: no compiler needed
    zero = config["zero_optimization"]
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = "auto"  # 10 x hidden size: norms stay whole
        zero["stage3_prefetch_bucket_size"] = "auto"
    if backend.device == "nvme":
        require_async_io(print if backends.rank() == 0 else _silent)
        zero["offload_optimizer"]["buffer_count"] = 4
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": 100_000_000}
        config["aio"] = {"block_size": 1048576, "queue_depth": 8, "overlap_events": True}
    return plugin


def _silent(_: str) -> None:
    pass


def _keep_shared_memory_op_unbuilt() -> None:
    """DeepSpeed 0.19 compiles `deepspeed_shm_comm` at start on CPU, used by inference only."""
    import deepspeed  # optional: only its own backends need it

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _refuse_difference(plan: Plan, accelerator: Accelerator) -> None:
    """Compare what Accelerate built with what the plan asked for.

    Raises:
        FinetuneError: with every difference; nothing must be trained on anything else.
    """
    expected = ENGINE_TYPES[plan.backend.engine]
    differences: list[str] = []

    def compare(what: str, asked: object, built: object) -> None:
        if asked != built:
            differences.append(f"{what}: the plan has {asked}, Accelerate built {built}")

    if accelerator.distributed_type not in expected:
        asked = " or ".join(sorted(kind.value for kind in expected))
        compare("distributed type", asked, accelerator.distributed_type.value)
    compare("processes", plan.processes, accelerator.num_processes)
    compare("processes", backends.world(), accelerator.num_processes)
    compare("accumulation", plan.accumulation, accelerator.gradient_accumulation_steps)
    compare("precision", plan.backend.precision, _precision(accelerator))
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp = accelerator.state.fsdp_plugin
        compare("fsdp_version", 2, fsdp.fsdp_version)
        compare("reshard_after_forward", plan.backend.shard == "params", fsdp.reshard_after_forward)
        offloaded = isinstance(fsdp.cpu_offload, CPUOffloadPolicy)
        compare("offload", plan.backend.offload == "all", offloaded)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = backends.ZERO_SHARDS[accelerator.state.deepspeed_plugin.zero_stage]
        compare("shard", plan.backend.shard, stage)
    if differences:
        raise FinetuneError(*differences)


def _precision(accelerator: Accelerator) -> str:
    return {"bf16": "bf16", "no": "fp32"}.get(accelerator.mixed_precision, "unknown")
