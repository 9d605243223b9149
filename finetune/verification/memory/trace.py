"""Trace one training step of a plan: the real engine, model and loss on fake tensors.

Runs in a separate process as rank 0 of the job: torch's fake process group completes every
collective immediately.
"""

import contextlib
import dataclasses
import datetime
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.data.collate import MicroBatch
from finetune.distributed.base import Engine
from finetune.distributed.build import build as build_engine
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.training import optim
from finetune.verification.memory.fake_model import Packed, build, counts, layers_of, register
from finetune.verification.memory.tracker import (
    ADAPTERS,
    CASTS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Tracker,
)


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A traced step of a model with `layers` layers, in bytes on one rank."""

    layers: int
    parameters: int
    """Elements of the model without its adapter."""
    trained: int
    held: dict[str, int]
    """Bytes that persist between steps, by label: weights, adapters, optimizer."""
    gradients: int
    """Bytes of gradients before the optimizer's step."""
    saved: int
    """Bytes that layers save for the backward pass."""
    peaks: dict[str, dict[str, int]]
    """Bytes by label at the peak of each moment."""
    collectives: dict[str, dict[str, tuple[int, int]]]
    """Number and payload bytes of collectives, by phase and kind."""


def join(processes: int) -> None:
    """Become rank 0 of a fake process group, whose collectives complete without other ranks."""
    if processes > 1:
        dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())


def rehearse(plan: Plan, config: dict[str, Any], sizes: list[int]) -> list[Rehearsed]:
    """Take two steps with each number of layers and measure the second.

    Raises:
        FinetuneError: transformers does not know the model, or it cannot be traced.
    """
    register()
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        engine = build_engine(plan, Path(scratch), datetime.timedelta(minutes=5))
        steps: list[Rehearsed] = []
        for layers in sizes:
            # A tensor of another mode would be copied, and its bytes counted twice.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            network = build(plan, config, layers, fake)
            try:
                steps.append(_Step(engine, network, layers, fake).run())
            except DataDependentOutputException as error:
                raise FinetuneError(
                    f"--verify: the step reads a value of a tensor ({error.func}), and fake "
                    f"tensors have none: {_reader(plan)} cannot be traced"
                ) from None
        return steps


def _reader(plan: Plan) -> str:
    """What reads values of tensors: torch 2.13's Adafactor, or a model that routes by value."""
    return "optim.name=adafactor" if plan.recipe.optim.name == "adafactor" else "the model"


class _Step:
    """Traces a second step, in which the optimizer's moments already exist."""

    def __init__(
        self, engine: Engine, network: nn.Module, layers: int, fake: FakeTensorMode
    ) -> None:
        self.engine, self.plan, self.count = engine, engine.plan, layers
        self.layers = layers_of(network, layers)
        self.trained, whole = counts(network)
        self.parameters = whole - (self.trained if engine.plan.recipe.adapter else 0)
        self.packed = [module for module in network.modules() if isinstance(module, Packed)]
        self.fake, self.tracker = fake, Tracker()
        self.forwards = False
        self.saved: int | None = None
        self.before = 0
        for index, layer in enumerate(self.layers):  # before the engine's own hooks
            self._watch(index, layer)
        head = network.get_output_embeddings()
        if head is not None:
            head.register_forward_hook(lambda *_: self.tracker.begin("forward: loss"))
        self._prepare(network)
        recipe = self.plan.recipe
        self.shape = (recipe.batch.micro_rows * recipe.documents_per_row, recipe.batch.max_length)

    def _prepare(self, network: nn.Module) -> None:
        """`Engine.prepare` in two parts, as Accelerate 1.15 finds FSDP2's parameters by address."""
        engine = self.engine
        engine.wrap_alone(network)
        engine.optimizers = optim.build(
            engine.model, self.plan.recipe.optim, self.plan.lr, engine.device
        )

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Begin a moment when the forward or the backward pass enters this layer."""
        last = self.count - 1
        names = {last: "last layer", last - 1: "last layer but one", 0: "first layer"}
        # Layers in between hold less than the last but one and get no moment.
        name = f"backward: {names[index]}" if index in names else ""

        def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not self.forwards:
                return  # recomputed by activation checkpointing
            (hidden,) = [*given, *named.values()][:1]
            if index == 0:
                self._enter_first(hidden)
            self.tracker.begin("forward: last layer" if index == last else "")

        def leave(_: nn.Module, given: object, result: Any) -> None:
            if not self.forwards:
                return
            output = result[0] if isinstance(result, tuple) else result
            output.register_hook(lambda _: self.tracker.begin(name))
            if index == last:
                self._leave_last(output)

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)

    def _enter_first(self, hidden: torch.Tensor) -> None:
        if self.saved is None:
            self.before = self._kept() - hidden.untyped_storage().nbytes()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.tracker.begin("backward: embedding"))

    def _leave_last(self, output: torch.Tensor) -> None:
        if self.saved is None:
            self.saved = self._kept() - output.untyped_storage().nbytes() - self.before
        self.tracker.begin("forward: head")

    def _kept(self) -> int:
        """Live bytes saved by operations; with weight casts, unless checkpointing drops them."""
        parts = self.tracker.parts()
        checkpointed = self.plan.recipe.model.activation_checkpointing
        return parts.get(OTHER, 0) + (0 if checkpointed else parts.get(CASTS, 0))

    def run(self) -> Rehearsed:
        with self.fake:
            self._micro_batch(last=True)
            self._update()
            self.saved = None
            held = self._hold()
            with self.tracker:
                gradients = self._step()
        return Rehearsed(
            layers=self.count,
            parameters=self.parameters,
            trained=self.trained,
            held=held,
            gradients=gradients,
            saved=self.saved or 0,
            peaks={name: peak.parts for name, peak in self.tracker.peaks.items()},
            collectives=self._collectives(),
        )

    def _hold(self) -> dict[str, int]:
        """Register tensors that persist between steps; returns their bytes by label."""
        model, tracker = self.engine.model, self.tracker
        adapted = self.plan.recipe.adapter is not None
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        tracker.hold([*frozen, *model.buffers()], WEIGHTS)
        for module in self.packed:
            tracker.hold(module.scales(), WEIGHTS)
        tracker.hold(trained, ADAPTERS if adapted else WEIGHTS)
        for optimizer in self.engine.optimizers:
            for state in optimizer.state.values():
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                tracker.hold(tensors, OPTIMIZER)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._label_gradient)
        return tracker.parts()

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.hold([parameter.grad], GRADIENTS)

    def _step(self) -> int:
        """Run the measured step; returns the bytes of its gradients."""
        tracker = self.tracker
        earlier = ("first", "middle")[: self.plan.accumulation - 1]
        for tracker.phase in earlier:
            self._micro_batch(last=False)
            tracker.relabel(OTHER, GRADIENTS)
        tracker.phase = "last"
        self._micro_batch(last=True)
        grads = [p.grad for p in self.engine.model.parameters() if p.grad is not None]
        tracker.hold(grads, GRADIENTS)
        gradients = tracker.parts().get(GRADIENTS, 0)
        tracker.phase = "update"
        tracker.begin("optimizer step")
        self._update()
        return gradients

    def _update(self) -> None:
        """`Engine.step` without reading the norm, as fake tensors have no values."""
        self.engine.clip()
        self.engine.update(taken=True)

    def _micro_batch(self, last: bool) -> None:
        """Run a forward and a backward pass as `train_step` does."""
        recipe, engine, tracker = self.plan.recipe, self.engine, self.tracker
        tracker.begin("forward: embedding")
        ids = torch.zeros(self.shape, dtype=torch.int64)
        batch = MicroBatch(
            ids, ids, None, recipe.batch.micro_rows, ids.numel(), ids.numel(),
            document_labels=torch.full(self.shape[:1], self.shape[1]),
            columns={"reference": torch.zeros(self.shape[0])},
        )  # fmt: skip
        with engine.unsynchronised(last), _autocast_as_on_a_gpu(engine):
            self.forwards = True
            loss = recipe.loss(engine.model, batch)
            self.forwards = False
            tracker.begin("backward: loss and head")
            total = loss.sum if loss.balance is None else loss.sum + loss.balance
            engine.backward(total * 1.0, last)

    def _collectives(self) -> dict[str, dict[str, tuple[int, int]]]:
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for each in self.tracker.collectives:
            phase = found.setdefault(each.phase, {})
            number, payload = phase.get(each.kind, (0, 0))
            phase[each.kind] = (number + 1, payload + each.payload)
        return found


@contextlib.contextmanager
def _autocast_as_on_a_gpu(engine: Engine) -> Iterator[None]:
    """Enable CUDA's autocast, which PEFT 0.21 checks before it casts a 4-bit layer's input."""
    torch.set_autocast_enabled("cuda", engine.accelerator.native_amp)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
