"""Base class of the engines that Accelerate builds for a plan.

Each engine is a subclass in its own file. It provides Accelerate's arguments, compares what
Accelerate built with the plan, takes steps, and locates each trained element. Without an
accelerator, every engine runs over gloo with the same configuration files.
"""

import abc
import contextlib
import dataclasses
import datetime
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from finetune import backend as backends
from finetune.data.rows.collate import MicroBatch
from finetune.data.rows.embedding_noise import Noise
from finetune.distributed import workarounds
from finetune.distributed.device import numbered
from finetune.distributed.fragments import Fragment
from finetune.distributed.loss_scale import LossScale, announce_fp16, autocasting
from finetune.distributed.parameters import local, moment_elements
from finetune.distributed.plan_differences import Compare, comparing, wrapped_by
from finetune.distributed.ranks import Ranks, group_on_host
from finetune.distributed.reader import Reader
from finetune.errors import FinetuneError, refuse
from finetune.planner import Plan
from finetune.process import rendezvous
from finetune.process.attributes import changed

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ElementCounts:
    """Element counts that one rank holds between steps.

    Gradients are counted just before the optimizer's step, or after the first micro-batch of a step
    if each micro-batch is reduced.
    """

    parameters: int
    gradients: int
    optimizer: int
    """Elements of the first moment in memory (0 if it is offloaded to disk)."""


class Engine(Ranks):
    """The accelerator and the wrapped model of one process, and the operations of a step."""

    kinds: ClassVar[frozenset[DistributedType]]
    """Accelerate's distributed types that select this engine."""

    def __init__(self, plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> None:
        """Build the Accelerator of this process.

        Args:
            plan: Plan of the run.
            nvme_path: Folder for a backend that offloads to disk.
            timeout: Timeout of collectives.

        Raises:
            FinetuneError: Accelerate built something different from the plan.
        """
        self.plan = plan
        if rendezvous.world() > 1:
            workarounds.meet_apart_from_earlier_groups(rendezvous.restarts())
        self.prepare_libraries()
        # Accelerator waits for all processes, so what is printed about the wait comes first.
        rendezvous.announce_wait(timeout)
        self.accelerator = Accelerator(
            # ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the argument, not the plugin (1.15).
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=plan.accumulation, sync_with_dataloader=False
            ),
            mixed_precision="bf16" if plan.backend.precision == "bf16" else "no",
            **self.plugin(nvme_path, timeout),
        )
        self.scale = LossScale(plan.backend.precision == "fp16")
        if self.scale.used:
            announce_fp16(self.accelerator)
        self._refuse_difference()
        self.model: nn.Module = nn.Module()
        self.optimizers: list[torch.optim.Optimizer] = []
        # Over the hosts, so that the exchange of a number does not wait for a GPU.
        self.control = group_on_host(self.device) if self.world > 1 else None
        self.held_gradients: int | None = None
        self.notes: list[str] = []
        """Notes for the log on how the model was prepared."""

    # Methods for subclasses ----------------------------------------------------------------------

    @abc.abstractmethod
    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        """Arguments of `Accelerator` in addition to accumulation and precision."""

    def prepare_libraries(self) -> None:
        """Apply workarounds before Accelerate is built.

        Accelerate 1.15 imports DeepSpeed to check whether the model of any engine is wrapped by it.
        The import takes half a second, and a broken installation of DeepSpeed would end an FSDP
        run.
        """
        workarounds.without_deepspeed(True)

    def compare_built(self, compare: Compare) -> None:
        """Compare what is specific to this engine in what Accelerate built with the plan."""

    def compare_wrapped(self, compare: Compare) -> None:
        """Compare the wrapper of the model with the plan."""

    @abc.abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """The fragments that this rank writes; the ranks together write each element once."""

    @abc.abstractmethod
    def restore(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        """Fill this rank's fp32 weights and optimizer state from a checkpoint.

        `extras(name)` returns the unsharded state of a parameter, and its scalars.
        """

    # Position of this process --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def data_rank(self) -> int:
        """Index of the share of a step's rows that this process reads."""
        return self.plan.mesh.data_rank(self.rank)

    @property
    def data_world(self) -> int:
        """Number of shares that the rows of a step are divided into."""
        return self.plan.mesh.data

    @property
    def averaged(self) -> int:
        """Number of processes that a gradient is averaged over; losses are multiplied by it."""
        return self.data_world

    @property
    def counts(self) -> bool:
        """Whether this process counts in sums over rows: one of the processes with equal rows."""
        return True

    @property
    def writes_unsharded(self) -> bool:
        """Whether this process writes unsharded state: one of the processes with equal layers."""
        return self.is_main

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which prints and writes the run's records."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Device of this process; a GPU with its number."""
        return numbered(self.accelerator.device)

    # The model -----------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model without the engine's wrapper."""
        return self.model

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters with their names, in the same order on every rank."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def owners(self) -> dict[int, torch.optim.Optimizer]:
        """The optimizer of each trained parameter, by `id`, without Accelerate's wrapper."""
        return {
            id(parameter): each.optimizer  # type: ignore[attr-defined]
            for each in self.optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }

    @contextlib.contextmanager
    def loading(self, config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
        """Context in which `from_pretrained` with the yielded arguments loads the local part."""
        yield {}

    def attention(self, config: Any, core: str) -> str:
        """Name of the attention implementation that wraps `core`, the one of a single process."""
        return core

    def divide(self, model: nn.Module) -> nn.Module:
        """The local part of a model that was built complete."""
        return model

    @contextlib.contextmanager
    def without_partitioning(self) -> Iterator[None]:
        """Context in which a model is not partitioned while it is built or loaded."""
        yield

    def prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Hand model and optimizers to Accelerate, which shards them in place.

        Raises:
            FinetuneError: the wrapper of the model differs from the plan.
        """
        self.wrap(model, optimizers)
        compare = comparing(differences := list[str]())
        compare("engine", self.plan.backend.engine, wrapped_by(self.model))
        # Reads attributes of this engine's wrapper, which another wrapper lacks.
        if not differences:
            self.compare_wrapped(compare)
        refuse(differences)

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """`prepare` without the comparison."""
        with autocasting(self.accelerator, self.scale.used):
            self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)

    def wrap_model(self, model: nn.Module) -> None:
        """Wrap a model without placing it on a device or preparing optimizers (for a rehearsal)."""
        self.model = self.accelerator.prepare_model(model, device_placement=False)

    @contextlib.contextmanager
    def gathered(self, blank: nn.Module | None = None) -> Iterator[nn.Module]:
        """Context in which this rank can run the model alone: weights are gathered on entry.

        An engine that divides the model gathers them into `blank`, a complete model on the meta
        device (`finetune.models.shell`); others ignore it.
        """
        yield self.module

    def follow_masters(self) -> None:
        """Give the model the values of master weights, if the engine has any."""

    def gather_frozen_units(self) -> None:
        """Gather frozen units once after the first forward pass; call it on every rank."""

    def reshard(self) -> None:
        """Reshard what forward passes without a backward pass left gathered."""

    def close(self) -> None:
        """End the trackers, then the process group."""
        self.accelerator.end_training()

    # A step --------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch; ranks synchronize at the last one of a step.

        The loss must already be multiplied by `averaged` x accumulation / terms, because every
        engine divides by the first two.
        """
        # Accelerate's optimizers ignore `step` and `zero_grad` unless this is set for the last one.
        self.accelerator.gradient_state._set_sync_gradients(last)
        self.accelerator.backward(loss)
        if self.held_gradients is None and self.plan.synchronises_each:
            self.held_gradients = self.gradient_elements()

    def accumulate(
        self,
        batches: list[MicroBatch],
        seeds: list[int],
        loss_of: Callable[[int, nn.Module], torch.Tensor],
        before_last: Callable[[], object],
    ) -> None:
        """Run all forward and backward passes of a step.

        Args:
            batches: Micro-batches of this process.
            seeds: Dropout seed of each micro-batch.
            loss_of: Computes the scaled loss of a micro-batch from its index and the model.
            before_last: Called before the passes of the last micro-batch.
        """
        for index, seed in enumerate(seeds):
            last = index == len(batches) - 1
            if last:
                before_last()
            # For each micro-batch: its dropout must not depend on what this rank computed before.
            torch.manual_seed(seed)
            Noise.current = batches[index].noise
            with self.unsynchronised(last):
                self.backward(loss_of(index, self.model), last)

    def forward_only(
        self, batch: MicroBatch, loss_of: Callable[[int, nn.Module], torch.Tensor]
    ) -> None:
        """Run a forward pass of a micro-batch from `local_batches`, without gradients."""
        loss_of(0, self.model)

    def running(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Context in which forward passes run another model, which was built by this engine."""
        return changed(self, model=model)

    def counted_elsewhere(self, model: nn.Module) -> set[int]:
        """The `id`s of parameters that a process with other layers holds and counts too."""
        return set()

    def over_stages(self, counts: list[int]) -> list[int]:
        """Sum counts, which exclude `elsewhere`, over the processes with other layers."""
        return counts

    def local_batches(self, batches: list[MicroBatch], pad_id: int) -> list[MicroBatch]:
        """The micro-batches of a step as this process computes them, without collectives."""
        return batches

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which gradients stay on this rank, unless the micro-batch is the last."""
        return contextlib.nullcontext()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, update, and clear the gradients.

        Returns the global norm before clipping, and whether the update was made: a gradient that is
        not finite is dropped on every rank, because all ranks see the same norm.
        """
        self.before_step(lr)
        if self.scale.used:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            self.scale.undo([local(grad) for grad in grads])
        # After `undo`, because the limit is one for the true gradient, not the scaled one.
        norm = float(self.clip())
        taken = math.isfinite(norm)
        self.update(taken)
        if taken:
            self.scale.taken()
        return norm, taken

    def before_step(self, lr: float) -> None:
        """Set the learning rate of the optimizers; count gradient elements at the first step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_share", 1.0)
        if self.held_gradients is None:
            self.held_gradients = self.gradient_elements()

    def clip(self) -> torch.Tensor:
        """Clip the gradients; returns their norm before clipping, a scalar."""
        limit = self.plan.recipe.optim.max_grad_norm
        bound = float("inf") if limit is None else limit
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), bound)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def update(self, taken: bool) -> None:
        """Step the optimizers if `taken`, and clear the gradients."""
        for optimizer in self.optimizers:
            if taken:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def reduced(
        self, sums: Mapping[str, float], maxima: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums over the rows of all ranks and maxima over all ranks, by name, in one collective.

        A rank whose rows another one counts too (`counts`) adds nothing to the sums.
        """
        mine = [value if self.counts else 0.0 for value in sums.values()]
        totals, largest = self.sums_and_maxima(mine, list(maxima.values()))
        return dict(zip(sums, totals, strict=True)), dict(zip(maxima, largest, strict=True))

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Run a function on every rank; all ranks raise what any of them refuses."""
        if self.world == 1:
            return work()
        # A key that no earlier call has used: the store keeps what was written under it.
        call, outcome, refused = self.from_first(secrets.token_hex(8)), None, list[str]()
        try:
            outcome = work()
        except FinetuneError as error:
            # Only refusals are exchanged. A subclass, such as a failure, ends this rank at once.
            if type(error) is not FinetuneError:
                raise
            refused = list(error.problems)
        found = self.refusals(call, refused)
        if not found:
            return outcome  # type: ignore[return-value]
        # The same on every rank: printed once, without places.
        if found == dict.fromkeys(range(self.world), refused):
            raise FinetuneError(*refused)
        places = {rank: f"rank {rank} ({self.plan.mesh.where(rank)})" for rank in sorted(found)}
        raise FinetuneError(*(f"{places[rank]}: {each}" for rank in places for each in found[rank]))

    # Elements that this rank holds ---------------------------------------------------------------

    def element_counts(self) -> ElementCounts:
        """Element counts of this rank; valid after the first step."""
        parameters = sum(self.resident(parameter) for parameter in self.module.parameters())
        return ElementCounts(
            parameters,
            self.held_gradients or 0,
            moment_elements(state for _, state in self.stepped()),
        )

    def resident(self, parameter: nn.Parameter) -> int:
        """Elements of a parameter in this rank's memory between steps."""
        return local(parameter.data).numel()

    def gradient_elements(self) -> int:
        """Elements of gradients in this rank's memory."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return sum(local(grad).numel() for grad in grads)

    def stepped(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """This rank's part of each tensor that an optimizer has stepped, and its state."""
        for optimizer in self.optimizers:
            for parameter, state in optimizer.optimizer.state.items():  # type: ignore[attr-defined]
                yield local(parameter.data), state

    def _refuse_difference(self) -> None:
        """Compare what Accelerate built with the plan.

        Raises:
            FinetuneError: with every difference.
        """
        differences: list[str] = []
        compare, built = comparing(differences), self.accelerator
        if built.distributed_type not in self.kinds:
            asked = " or ".join(sorted(kind.value for kind in self.kinds))
            compare("distributed type", asked, built.distributed_type.value)
        compare("processes", self.plan.processes, built.num_processes)
        compare("processes", rendezvous.world(), built.num_processes)
        compare("accumulation", self.plan.accumulation, built.gradient_accumulation_steps)
        precision = backends.PRECISIONS.get(built.mixed_precision, "unknown")
        compare("precision", self.plan.backend.precision, precision)
        # Reads what only an accelerator of the right kind has.
        if built.distributed_type in self.kinds:
            self.compare_built(compare)
        refuse(differences)
