"""The engine that Accelerate builds for a plan, driven one step at a time."""

import contextlib
import dataclasses
import datetime
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from finetune.distributed import accelerator
from finetune.distributed.shared_memory import share_memory
from finetune.errors import FinetuneError, TrainingFailure
from finetune.planner import Plan
from finetune.planner.estimate.sharding.deepspeed import REDUCE_BUCKET

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Held:
    """Elements that one rank holds between steps.

    Gradients: just before the optimizer's step, or, where each micro-batch is reduced, after the
    step's first.
    """

    parameters: int
    gradients: int
    optimizer: int
    """Elements of the first moment in memory (none while it lies on a disk)."""


class Engine:
    """One process's end of the job: the accelerator, the model, and how a step is taken."""

    def __init__(self, plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> None:
        self.plan = plan
        self.accelerator = accelerator.build(plan, nvme_path, timeout)
        self.model: nn.Module = nn.Module()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.control = group_on_host(self.device) if self.world > 1 else None
        self.held_gradients: int | None = None
        self.notes: list[str] = []
        """What is to be said of how the model was prepared."""

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
        if self.deepspeed:
            self._fit_buckets(model)
        named = model.named_buffers() if self.deepspeed else ()
        buffers = {name: buffer.detach().clone() for name, buffer in named}
        if self.plan.backend.engine == "fsdp":
            accelerator.name_units(self.accelerator, model)
        with accelerator.without_values():
            self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        if self.deepspeed:
            _restore_buffers(self.module, buffers)
        accelerator.keep_compute_type_between_units(self.model)
        accelerator.refuse_other_engine(self.plan, self.model)
        if self.plan.backend.engine == "fsdp" and self.device.type == "cpu" and self.world > 1:
            reason = share_memory(self.model)
            if reason is not None:
                self.notes.append(f"FSDP's weights and gradients go over gloo, because {reason}")

    def gather_frozen_units(self) -> None:
        """After a first forward pass: see `finetune.distributed.accelerator.gather_frozen_units`."""
        accelerator.gather_frozen_units(self.model)

    def _fit_buckets(self, model: nn.Module) -> None:
        """Let ZeRO-2 and 3 allocate buckets no larger than what they reduce.

        DeepSpeed 0.19 allocates one of 500 million elements whole, for an adapter of four too.
        """
        plugin = self.accelerator.state.deepspeed_plugin
        sizes = [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]
        bucket = min(REDUCE_BUCKET, sum(sizes))
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = bucket

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
        if self.held_gradients is None and self.plan.synchronises_each:
            self.held_gradients = self._gradient_elements()

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, a micro-batch that is not the last keeps its gradients to this rank.

        DeepSpeed is told by `backward`; FSDP may reduce each micro-batch (the plan says when).
        """
        keeps = self.plan.backend.engine in ("ddp", "fsdp") and not self.plan.synchronises_each
        return (
            contextlib.nullcontext() if last or not keeps else self.accelerator.no_sync(self.model)
        )

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
        if self.held_gradients is None:
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
        return self.meet(values, [])[0]

    def largest(self, values: list[int]) -> list[int]:
        """Element-wise maximum over all ranks."""
        return self.meet([], values)[1]

    def meet(self, summed: list[float], largest: list[int]) -> tuple[list[float], list[int]]:
        """Element-wise sums in fp64 and maxima over all ranks, in one collective on the host.

        No accelerator has to be waited for. Integers are exact below 2**53.
        """
        if self.world == 1:
            return [float(value) for value in summed], largest
        mine = torch.tensor([*summed, *largest], dtype=torch.float64)
        ranks = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(ranks, mine, group=self.control)
        table = torch.stack(ranks)  # (world, values)
        sums, maxima = table.sum(dim=0), table.amax(dim=0)
        first = len(summed)
        return sums[:first].tolist(), [int(value) for value in maxima[first:].tolist()]

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank; values of the others are not looked at."""
        if self.world == 1:
            return value
        seen = [value]
        torch.distributed.broadcast_object_list(seen, src=0, group=self.control)
        return seen[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0; every rank gets its result, or raises its error."""
        outcome: T | FinetuneError | None = None
        if self.speaks:
            try:
                outcome = work()
            except FinetuneError as error:
                outcome = error
            except OSError as error:
                outcome = TrainingFailure(f"{error.filename}: {error.strerror}")
        outcome = self.from_first(outcome)
        if isinstance(outcome, FinetuneError):
            raise outcome
        return outcome  # type: ignore[return-value]

    def gather(self, value: Any, group: torch.distributed.ProcessGroup | None = None) -> list[Any]:
        """What each rank has, by rank, on every rank; over `group` where one is given."""
        if self.world == 1:
            return [value]
        ranks: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(ranks, value, group=group or self.control)
        return ranks

    def held(self) -> Held:
        """What this rank holds; meaningful after the first step."""
        parameters = sum(_resident(parameter) for parameter in self.module.parameters())
        return Held(parameters, self.held_gradients or 0, self._moment_elements())

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


def group_on_host(device: torch.device) -> torch.distributed.ProcessGroup | None:
    """Where ranks tell each other numbers and objects: a group of gloo, None for the default one.

    On an accelerator the default group is its own library's: a rank that waits in it keeps the
    device busy, waits for all that the device has to do, and is ended after the timeout.
    """
    return None if device.type == "cpu" else torch.distributed.new_group(backend="gloo")


def _restore_buffers(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Undo the rounding of buffers: DeepSpeed 0.19 puts them into the type that it computes with.

    Among them are the biases that choose experts, which transformers keeps in fp32.
    """
    for name, buffer in module.named_buffers():
        if buffer.dtype != before[name].dtype:
            buffer.data = before[name].to(buffer.device)


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
