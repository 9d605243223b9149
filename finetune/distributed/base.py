"""The engine that Accelerate builds for a plan, driven one step at a time.

Each engine is a subclass in a file of its own: it says what Accelerate is given, compares what was
built with what was asked, and knows how a step is taken and where each trained element is. On a
machine without an accelerator every engine runs for real over gloo, with the same configuration
files.
"""

import abc
import contextlib
import dataclasses
import datetime
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from finetune import backend as backends
from finetune.data.collate import MicroBatch
from finetune.distributed import workarounds
from finetune.distributed.compare import Compare, comparing, wrapped_by
from finetune.distributed.fragments import Fragment
from finetune.distributed.loss_scale import LossScale, announce_fp16, autocasting
from finetune.distributed.parameters import local, moment_elements
from finetune.distributed.ranks import Ranks, group_on_host
from finetune.distributed.reader import Reader
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.process import rendezvous

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


class Engine(Ranks):
    """One process's end of the job: the accelerator, the model, and how a step is taken."""

    kinds: ClassVar[frozenset[DistributedType]]
    """What Accelerate calls it."""

    def __init__(self, plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> None:
        """Build the Accelerator of this process.

        Args:
            nvme_path: folder for a backend that offloads to a disk.
            timeout: how long a collective waits for the other processes.

        Raises:
            FinetuneError: Accelerate built something else than the plan asks for.
        """
        self.plan = plan
        if attempt := rendezvous.restarts():
            workarounds.meet_apart_from_earlier_attempts(attempt)
        self.settle_libraries()
        rendezvous.announce_wait()
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
        self.control = group_on_host(self.device) if self.world > 1 else None
        self.held_gradients: int | None = None
        self.notes: list[str] = []
        """What is to be said of how the model was prepared."""

    # What an engine is ---------------------------------------------------------------------------

    @abc.abstractmethod
    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        """What Accelerate is given besides accumulation and precision."""

    def settle_libraries(self) -> None:
        """Before Accelerate is built.

        Accelerate 1.15 loads DeepSpeed to see whether a model of another engine is one of its own.
        That takes half a second, and an installation of DeepSpeed that is broken ends a run of
        FSDP.
        """
        workarounds.without_deepspeed(True)

    def compare_built(self, compare: Compare) -> None:
        """Compare what Accelerate built with the plan, besides what every engine has."""
        return

    def compare_wrapped(self, compare: Compare) -> None:
        """Compare what the model was wrapped in with the plan, on the wrapper itself."""
        return

    @abc.abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """The fragments that this rank writes; together the ranks write each element once."""

    @abc.abstractmethod
    def restore(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        """Fill this rank's fp32 weights and optimizer state from a checkpoint.

        `extras(name)` gives the state of a parameter that is not cut, and its scalars.
        """

    # Where this process is -----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def data_rank(self) -> int:
        """Which share of a step's rows this process reads."""
        return self.plan.mesh.data_rank(self.rank)

    @property
    def data_world(self) -> int:
        """How many shares a step's rows are dealt to."""
        return self.plan.mesh.data

    @property
    def averaged(self) -> int:
        """Over how many processes a gradient is averaged, which a loss is multiplied by before."""
        return self.data_world

    @property
    def counts(self) -> bool:
        """Whether sums over rows take this process's share: one of those with the same rows."""
        return True

    @property
    def writes_whole(self) -> bool:
        """Whether this process writes what is not cut; one of those with the same layers."""
        return self.speaks

    @property
    def speaks(self) -> bool:
        """Whether this rank talks to the person and writes the record."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    # The model -----------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model without what the engine wrapped round it."""
        return self.model

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters by name, in the same order on every rank."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def owners(self) -> dict[int, torch.optim.Optimizer]:
        """The optimizer of each trained parameter, without Accelerate's wrapper, by identity."""
        return {
            id(parameter): each.optimizer  # type: ignore[attr-defined]
            for each in self.optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }

    @contextlib.contextmanager
    def loading(self) -> Iterator[dict[str, Any]]:
        """Inside, `from_pretrained` with the yielded words loads what this process holds."""
        yield {}

    def attention(self, config: Any, core: str) -> str:
        """Name of the attention of a model of a config, around that of one process."""
        return core

    def divide(self, model: nn.Module) -> nn.Module:
        """What this process holds of a model that was built complete."""
        return model

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, a model is not partitioned while it is built or loaded."""
        yield

    def prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Hand model and optimizers to Accelerate, which shards them in place.

        Raises:
            FinetuneError: the model was wrapped in something else than the plan asks for.
        """
        self.wrap(model, optimizers)
        differences: list[str] = []
        compare = comparing(differences)
        compare("engine", self.plan.backend.engine, wrapped_by(self.model))
        if not differences:
            self.compare_wrapped(compare)
        if differences:
            raise FinetuneError(*differences)

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """`prepare` without the comparison."""
        with autocasting(self.accelerator, self.scale.used):
            self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)

    def wrap_alone(self, model: nn.Module) -> None:
        """Wrap a model whose optimizers are made afterwards, on no device (a rehearsal)."""
        self.model = self.accelerator.prepare_model(model, device_placement=False)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Inside, the model runs on this rank alone: its weights are gathered once, at entry."""
        yield self.module

    def gather_frozen_units(self) -> None:
        """After a first forward pass: gather once what it did not enter, on every rank together."""
        return

    def reshard(self) -> None:
        """Give back what forward passes without a backward pass left gathered."""
        return

    def close(self) -> None:
        """Leave the job: trackers, then the process group."""
        self.accelerator.end_training()

    # A step --------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch; ranks meet at the last one of a step.

        The loss must already carry world x accumulation / terms: every engine divides by both.
        """
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
        """All forward and backward passes of a step.

        Args:
            batches: the micro-batches of this process.
            seeds: of dropout in each of them.
            loss_of: the scaled loss of a micro-batch, by its index, from the model.
            before_last: called before the passes of the last of them.
        """
        for index, seed in enumerate(seeds):
            last = index == len(batches) - 1
            if last:
                before_last()
            torch.manual_seed(seed)
            with self.unsynchronised(last):
                self.backward(loss_of(index, self.model), last)

    def look(self, batch: MicroBatch, loss_of: Callable[[int, nn.Module], torch.Tensor]) -> None:
        """A forward pass of a micro-batch that `settle` gave, without gradients."""
        loss_of(0, self.model)

    def elsewhere(self, model: nn.Module) -> set[int]:
        """Identities of parameters that another process with other layers counts too."""
        return set()

    def over_stages(self, counts: list[int]) -> list[int]:
        """Sums over processes with other layers, of counts without what is `elsewhere`."""
        return counts

    def every_stage(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What processes with other layers have too, in the order of the layers."""
        return [mine]

    def settle(self, batches: list[MicroBatch], pad_id: int) -> list[MicroBatch]:
        """The micro-batches of a step as this process computes them; no other is asked."""
        return batches

    def unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, a micro-batch that is not the last keeps its gradients to this rank."""
        return contextlib.nullcontext()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, update, and clear the gradients.

        Returns the norm before clipping, and whether the update was made: a gradient that is not
        finite is dropped, on every rank alike, because its norm is that of the whole job.
        """
        self.before_step(lr)
        if self.scale.used:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            self.scale.undo([local(grad) for grad in grads])
        norm = float(self.clip())
        taken = math.isfinite(norm)
        self.update(taken)
        if taken:
            self.scale.taken()
        return norm, taken

    def before_step(self, lr: float) -> None:
        """Tell the optimizers the learning rate, and count the gradients of the first step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        if self.held_gradients is None:
            self.held_gradients = self.gradient_elements()

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

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; where ranks hold other parts, all raise what any refused."""
        return work()

    # What this rank holds ------------------------------------------------------------------------

    def held(self) -> Held:
        """What this rank holds; meaningful after the first step."""
        parameters = sum(self.resident(parameter) for parameter in self.module.parameters())
        return Held(parameters, self.held_gradients or 0, moment_elements(self.states()))

    def resident(self, parameter: nn.Parameter) -> int:
        """Elements of a parameter in this rank's memory between steps."""
        return local(parameter.data).numel()

    def gradient_elements(self) -> int:
        """Elements of gradients in this rank's memory."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return sum(local(grad).numel() for grad in grads)

    def states(self) -> Iterator[dict[str, Any]]:
        """The optimizers' state, of one tensor after the other."""
        for optimizer in self.optimizers:
            yield from optimizer.optimizer.state.values()  # type: ignore[attr-defined]

    def _refuse_difference(self) -> None:
        """Compare what Accelerate built with what the plan asked for.

        Raises:
            FinetuneError: with every difference; nothing must be trained on anything else.
        """
        differences: list[str] = []
        compare, built = comparing(differences), self.accelerator
        if built.distributed_type not in self.kinds:
            asked = " or ".join(sorted(kind.value for kind in self.kinds))
            compare("distributed type", asked, built.distributed_type.value)
        compare("processes", self.plan.processes, built.num_processes)
        compare("processes", rendezvous.world(), built.num_processes)
        compare("accumulation", self.plan.accumulation, built.gradient_accumulation_steps)
        compare("precision", self.plan.backend.precision, _precision(built))
        if built.distributed_type in self.kinds:
            self.compare_built(compare)
        if differences:
            raise FinetuneError(*differences)


def _precision(accelerator: Accelerator) -> str:
    return backends.PRECISIONS.get(accelerator.mixed_precision, "unknown")
