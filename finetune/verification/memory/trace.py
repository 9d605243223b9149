"""Trace one training step of a plan: the real engine, model and loss on fake tensors.

Runs in a separate process as rank 0 of the job: torch's fake process group completes every
collective immediately.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from finetune.data.rows.collate import Boundaries, MicroBatch
from finetune.distributed.base import Engine
from finetune.distributed.layers import is_elsewhere, network_of
from finetune.distributed.mesh import MeshEngine
from finetune.models import image_parts
from finetune.models.scoring import head_of
from finetune.process.attributes import changed
from finetune.training import optim
from finetune.verification.memory.fake_model import Packed, counts, layers_of
from finetune.verification.memory.traced_images import KnownValues, pictured_rows
from finetune.verification.memory.tracker import (
    ADAPTERS,
    CASTS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Tracker,
)

Counts = dict[str, dict[str, tuple[int, int]]]
"""Collectives by phase and kind, on a mesh with the axis before it: number and payload bytes."""


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
    collectives: Counts
    image_tokens: int
    """Tokens of a micro-batch that features of images replace."""


class Step:
    """Traces a second step, in which the optimizer's moments already exist."""

    def __init__(
        self, engine: Engine, network: nn.Module, layers: int, fake: FakeTensorMode
    ) -> None:
        self.engine, self.plan = engine, engine.plan
        recipe, base = engine.plan.recipe, network_of(network)
        self.shape = (recipe.batch.micro_rows * recipe.documents_per_row, recipe.batch.max_length)
        self.pictured = pictured_rows(recipe, *self.shape) if recipe.model.reads else None
        decoder: Any = base.get_decoder() if recipe.model.reads else network
        self.layers = [each for each in layers_of(decoder, layers) if not is_elsewhere(each)]
        self.count = len(self.layers)
        self.trained, whole = counts(network)
        self.parameters = whole - (self.trained if recipe.adapter else 0)
        if self.pictured is not None:
            self._watch_tower(base)
        self.packed = [module for module in network.modules() if isinstance(module, Packed)]
        self.fake, self.tracker = fake, Tracker(engine.plan.mesh)
        self.forwards = False
        self.saved: int | None = None
        self.before = self.empty = 0
        for index, layer in enumerate(self.layers):  # before the engine's own hooks
            self._watch(index, layer)
        head = head_of(network)
        if head is not None and not is_elsewhere(head):
            head.register_forward_hook(lambda *_: self.tracker.begin("forward: loss"))
        self._prepare(network)

    def _prepare(self, network: nn.Module) -> None:
        """`Engine.prepare` in two parts, as Accelerate 1.15 finds FSDP2's parameters by address."""
        engine = self.engine
        if isinstance(engine, MeshEngine):
            optimizer = optim.build(network, self.plan.recipe.optim, self.plan.lr, self.plan)
            engine.wrap(network, optimizer)
            return
        engine.wrap_model(network)
        engine.optimizers = optim.build(
            engine.model, self.plan.recipe.optim, self.plan.lr, self.plan
        )

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Begin a moment when the forward or the backward pass enters this layer."""
        last = self.count - 1
        names = {1: "first layer but one"} if self.plan.traits.shards_all else {}
        names |= {last - 1: "last layer but one", last: "last layer", 0: "first layer"}
        # Layers in between hold less than these and get no moment.
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

    def _watch_tower(self, base: PreTrainedModel) -> None:
        """Begin a moment when the forward or the backward pass enters the tower.

        Numbers of parameters are those of the language model, as in the formulas.
        """
        parts = image_parts.part_of(base, [name for name, _ in base.named_parameters()])
        for name, parameter in base.named_parameters():
            if parts[name] != image_parts.LANGUAGE:
                trained = parameter.numel() if parameter.requires_grad else 0
                self.trained -= trained
                self.parameters -= 0 if ".lora_" in name else parameter.numel()

        def leave(_: nn.Module, given: object, result: Any) -> None:
            for each in tree_leaves(dict(result)):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda _: self.tracker.begin("backward: tower"))

        tower: Any = base.get_encoder(modality="image")
        tower.register_forward_pre_hook(lambda *_: self.tracker.begin("forward: tower"))
        tower.register_forward_hook(leave)

    def _enter_first(self, hidden: torch.Tensor) -> None:
        if self.saved is None:
            of_tower = self.pictured is not None  # what it saves is counted, too
            self.before = (
                self.empty if of_tower else self._kept() - hidden.untyped_storage().nbytes()
            )
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
        with self.fake, self._inputs():
            self._warm_up()
            self.saved = None
            held = self._hold()
            with self.tracker:
                gradients = self._step()
        return self._found(held, gradients)

    def _inputs(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.pictured is None else KnownValues()

    def forward(self) -> Rehearsed:
        """Take the first forward pass only, for what layers save."""
        with self.fake, self._inputs():
            held = self._hold()
            with self.tracker:
                self._micro_batch(last=True, forward=True)
        return self._found(held, 0)

    def _found(self, held: dict[str, int], gradients: int) -> Rehearsed:
        return Rehearsed(
            layers=self.count,
            parameters=self.parameters,
            trained=self.trained,
            held=held,
            gradients=gradients,
            saved=self.saved or 0,
            peaks={name: peak.parts for name, peak in self.tracker.peaks.items()},
            collectives=self._collectives(),
            image_tokens=0 if self.pictured is None else self.pictured.tokens,
        )

    def _warm_up(self) -> None:
        """A step after which the optimizer has its moments."""
        self._micro_batch(last=True)
        self._update()

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
        if self.pictured is not None:
            tracker.hold(self.pictured.images.values(), INPUTS)
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
        return self._end_step()

    def _end_step(self) -> int:
        """Update the parameters; returns the bytes of the gradients before it."""
        tracker = self.tracker
        grads = [p.grad for p in self.engine.model.parameters() if p.grad is not None]
        tracker.hold(grads, GRADIENTS)
        gradients = tracker.parts().get(GRADIENTS, 0)
        tracker.phase = "update"
        tracker.begin("optimizer step")
        self._update()
        return gradients

    def _update(self) -> None:
        """`Engine.step` without reading the norm, as fake tensors have no values."""
        with _no_limit(self.engine):
            self.engine.clip()
        self.engine.update(taken=True)

    def _micro_batch(self, last: bool, forward: bool = False) -> None:
        """Run a forward and, unless it is all that is asked, a backward pass like `train_step`."""
        engine, tracker = self.engine, self.tracker
        tracker.begin("forward: embedding")
        shared = self.plan.mesh.sequence > 1  # parts of rows count labels
        with unset_fake_temporarily() if shared else contextlib.nullcontext():
            (batch,) = engine.local_batches([self._batch()], 0)
        with engine.unsynchronised(last), _autocast_as_on_a_gpu(engine):
            self.forwards, self.empty = True, self._kept()
            loss = self._loss(engine.model, batch)
            self.forwards = False
            if forward:
                return
            tracker.begin("backward: loss and head")
            engine.backward(loss * 1.0, last)

    def _loss(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """The summed loss of a micro-batch, with that of the balance of experts if there is one."""
        loss = self.plan.recipe.loss(model, batch)
        return loss.sum if loss.balance is None else loss.sum + loss.balance

    def _batch(self) -> MicroBatch:
        """A micro-batch of complete rows, every token of which is trained."""
        shape, bounds = self.shape, None
        columns = "reference", *self.plan.recipe.columns
        if self.plan.mesh.sequence > 1:
            shape, bounds = (1, math.prod(self.shape)), _side_by_side(*self.shape)
        ids, images = torch.zeros(shape, dtype=torch.int64), dict[str, torch.Tensor]()
        if self.pictured is not None:
            ids, images = self.pictured.ids, self.pictured.images
        return MicroBatch(
            ids, ids, None, self.plan.recipe.batch.micro_rows, ids.numel(), ids.numel(), bounds,
            document_labels=torch.full(self.shape[:1], self.shape[1]),
            last_places=torch.arange(1, self.shape[0] + 1) * self.shape[1] - 1,
            columns={name: torch.zeros(self.shape[0]) for name in columns}, images=images,
        )  # fmt: skip

    def _collectives(self) -> Counts:
        found: Counts = {}
        for each in self.tracker.collectives:
            phase = found.setdefault(each.phase, {})
            name = f"{each.axis} {each.kind}".strip()
            number, payload = phase.get(name, (0, 0))
            phase[name] = (number + 1, payload + each.payload)
        return found


def _side_by_side(rows: int, length: int) -> Boundaries:
    """Rows of one length beside one another."""
    numbers = tuple(range(0, (rows + 1) * length, length))
    positions = torch.arange(length).repeat(rows)[None]
    return Boundaries(positions, torch.zeros(rows + 1, dtype=torch.int32), length, numbers)


@contextlib.contextmanager
def _no_limit(engine: Engine) -> Iterator[None]:
    """A mesh compares the norm with the limit on the host; nothing else of a step does."""
    plan = engine.plan
    if isinstance(engine, MeshEngine):
        plan = dataclasses.replace(plan, recipe=plan.recipe.with_optim(max_grad_norm=None))
    with changed(engine, plan=plan):
        yield


@contextlib.contextmanager
def _autocast_as_on_a_gpu(engine: Engine) -> Iterator[None]:
    """Enable CUDA's autocast, which PEFT 0.21 checks before it casts a 4-bit layer's input."""
    torch.set_autocast_enabled("cuda", engine.accelerator.native_amp)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
