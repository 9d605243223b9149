"""One step of a stage of a pipeline with fake tensors: torch's own schedule runs it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.pipelining import schedules

from finetune.distributed.pipeline import PASS, PipelineEngine
from finetune.process.attributes import changed
from finetune.verification.memory.trace import Counts, Rehearsed, Step
from finetune.verification.memory.tracker import OTHER


class PipelineStep(Step):
    """The step of one stage; of 1F1B as many micro-batches as it takes to repeat itself."""

    engine: PipelineEngine
    is_warm: ClassVar[bool] = False
    """Whether this process has taken a step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        axes, accumulation = self.plan.backend.axes, self.plan.accumulation
        repeats = axes.schedule == "1F1B"
        self.micro = min(accumulation, 2 * axes.pipeline + 1) if repeats else accumulation
        self.steady = axes.pipeline
        """A micro-batch before and after which the stage does the same, where some are left out."""
        self.handed: int | None = None
        """Bytes of the buffers for what other stages send, of all micro-batches."""
        self.tracker.entered = self._enter_pass

    def run(self) -> Rehearsed:
        found = super().run()
        more = round((self.handed or 0) * (self.plan.accumulation / self.micro - 1))
        peaks = {
            name: parts if name == "optimizer step" else parts | {OTHER: parts.get(OTHER, 0) + more}
            for name, parts in found.peaks.items()
        }
        return dataclasses.replace(found, peaks=peaks)

    def _warm_up(self) -> None:
        """Once by a step: DTensor keeps what it found out about the shapes of operations."""
        if PipelineStep.is_warm:
            for parameter in self.engine.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        else:
            self._run(self.plan.mesh.pipeline)
        self._update()
        PipelineStep.is_warm = True

    def _enter_pass(self, name: str) -> None:
        """A micro-batch passes through a stage: `stage pass 0 forward 3`."""
        if not name.startswith(PASS):
            return
        tracker, (_, _, index, kind, _) = self.tracker, name.split()
        if self.handed is None:
            self.handed = sum(tracker.parts().values()) - self.held
        tracker.phase, self.forwards = name, kind == "forward"
        last = int(index) == self.engine.stages[-1].total - 1
        begins = {"forward": "forward: embedding", "weights": "backward: weights"}
        tracker.begin(begins.get(kind, f"backward: {'loss and head' if last else 'last layer'}"))

    def _step(self) -> int:
        self.held = sum(self.tracker.parts().values())
        self._run(self.micro)
        return self._end_step()

    def _run(self, micro: int) -> None:
        """Forward and backward passes of so many micro-batches, as a step runs them."""
        engine = self.engine
        batches = engine.local_batches([self._batch()] * micro, 0)
        with _without_votes():
            engine.accumulate(
                batches,
                [0] * micro,
                lambda at, model: self._loss(model, batches[at]) * 1.0,
                lambda: None,
            )

    def _collectives(self) -> Counts:
        """The micro-batches that are left out do as the steady one: as phases `first` and `middle`.

        `extrapolate` takes the middle ones as often as there are micro-batches but two.
        """
        found = super()._collectives()
        update = found.pop("update", {})
        whole, steady = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
        for phase, kinds in found.items():
            parts = [whole, steady] if phase.endswith(f" {self.steady}") else [whole]
            for part in parts:
                for kind, (number, payload) in kinds.items():
                    before = part.get(kind, (0, 0))
                    part[kind] = (before[0] + number, before[1] + payload)
        for kind, (number, payload) in steady.items():
            count, size = whole[kind]
            left = self.micro - 2
            whole[kind] = (count - left * number, size - left * payload)
        return {"first": whole, "middle": steady, "update": update}


@contextlib.contextmanager
def _without_votes() -> Iterator[None]:
    """Let stages not ask one another whether shapes are known: other ranks have no answer.

    torch 2.13 reads the outcome out of a tensor; the messages are sent all the same.
    """
    from torch.distributed.pipelining.stage import InferenceMode  # torch 2.11 does not have it

    kind: Any = schedules._PipelineSchedule
    before = kind._warmup_p2p

    def with_static_shapes(
        self: Any, stages: list[Any], has_backward: bool, p2p_done: bool
    ) -> None:
        with unset_fake_temporarily():
            before(self, stages, has_backward, p2p_done)
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with changed(kind, _warmup_p2p=with_static_shapes):
        yield
