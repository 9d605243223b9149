"""Predict a run at its start, to be compared with what is measured."""

import contextlib
import dataclasses
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, memory, timing, traffic
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.judges import Judge, judges
from finetune.planner.estimate.moments import Moment
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.sampling import Sampling, sampling
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a run knows of its data and its machine before the first step."""

    length: int
    """Tokens of the longest row."""
    padded: bool
    """Whether rows of a micro-batch are padded."""
    labelled: int
    """Tokens of a micro-batch that have a label, at most."""
    slots: float
    """Token slots of a step over all processes, on average."""
    document: float
    """Tokens of a document on average, over which attention runs."""
    cpu: bool
    chained: bool
    """Whether cheap operations are compiled from C."""
    apart: bool
    """Whether each document attends in a call of its own."""
    scored: int
    """Tokens of the longest document, where attention is by products on a CPU; else 0."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Peak memory and times of a run on the machine that it runs on."""

    workload: Workload
    facts: Facts
    machine: Machine | None
    """None where its speed is not known: only memory is predicted then."""
    steps: int
    sampling: Sampling | None = None
    """Of a method that learns from completions."""
    judges: tuple[Judge, ...] = ()
    """Reward models, in processes next to rank 0."""

    @property
    def peak_memory(self) -> int:
        """Bytes of one process at the peak of the largest micro-batch."""
        return round(memory.timeline(self.workload).peak.total)

    def peaks(
        self, rows: int, length: int, padded: bool, labelled: int, longest: int
    ) -> list[Moment]:
        """The peak of each stage, by micro-batches of `rows` of `length` tokens.

        `longest` are the tokens of the longest document, 0 where rows are not side by side.
        """
        scored = longest if self.workload.scored else 0
        workload = dataclasses.replace(self.workload, rows=rows, scored=scored)
        workload = _of_length(workload, length, padded, labelled)
        return [found.peak for found in memory.by_stage(workload)]

    def of_ranks(self, peaks: list[Moment]) -> list[int]:
        """Bytes of each process at its peak, by rank: stages are the outermost axis."""
        each = self.workload.layout.processes // len(peaks)
        return [round(peak.total) for peak in peaks for _ in range(each)]

    def summary(self) -> dict[str, Any]:
        """For `plan.json`: bytes and seconds, by the names that the record measures them by."""
        timeline = memory.timeline(self.workload)
        found: dict[str, Any] = {
            "peak_memory": round(timeline.peak.total),
            "moment": timeline.peak.name,
            "length": self.workload.length,
        }
        if self.workload.layout.processes > 1:
            found |= {
                "layers": self.workload.shape.layers,
                "sent": dict(traffic.by_axis(advice.volume(self.workload))),
            }
        if self.machine is not None:
            moved = advice.volume(self.workload)
            each = self.facts.slots / self.workload.layout.processes
            times = timing.times(self.workload, self.machine, moved, each, self.facts.document)
            found |= {
                "step_seconds": times.step,
                "tokens_per_second": times.tokens_per_second,
                "seconds": times.step * self.steps,
                "machine": self.machine.gpu.name,
                "flops_per_second": self.machine.gpu.flops,
                "mfu": times.mfu,
            }
        if self.judges:
            found["reward_models"] = {each.name: round(each.memory) for each in self.judges}
        return found if self.sampling is None else found | self.sampling.summary()


def forecast(plan: Plan, steps: int, facts: Facts, machine: Machine | None) -> Forecast | None:
    """What a plan will take, or None where the formulas do not know the model or its adapter."""
    try:
        workload = workload_of(plan, model_source(plan.recipe).shape)
    except FinetuneError:
        return None
    # What runs before the first step only is no part of a step, which is what is measured.
    held = workload.reference_shape if workload.reference_stays else None
    workload = dataclasses.replace(
        workload,
        reference_shape=held,
        cpu=facts.cpu,
        chained=facts.chained,
        apart=facts.apart,
        scored=facts.scored,
    )  # fmt: skip
    workload = _of_length(workload, facts.length, facts.padded, facts.labelled)
    width = 2 if plan.backend.precision == "bf16" else 4
    sampled = sampling(
        plan.recipe, workload.shape, plan.processes, width, machine, tokens=facts.length
    )
    found = list[Judge]()
    with contextlib.suppress(FinetuneError):  # of a model that the formulas do not know
        found = judges(plan.recipe, lambda each: model_source(each).shape, facts.cpu, facts.length)
    return Forecast(workload, facts, machine, steps, sampled, tuple(found))


def _of_length(workload: Workload, length: int, padded: bool, labelled: int) -> Workload:
    """Rows of other lengths are padded, and a mask tells so."""
    attention = workload.attention
    if attention != "eager":
        attention = "masked" if padded else "flash"
    share = min(1.0, labelled / (workload.rows * length))
    return dataclasses.replace(workload, length=length, attention=attention, labelled=share)
