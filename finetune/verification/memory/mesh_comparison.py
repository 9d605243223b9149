"""Compare the plan of a mesh with traces of its stages: memory, and bytes along each axis."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from finetune.planner import schedules
from finetune.planner.estimate import memory, traffic
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan
from finetune.verification.memory.plan_and_trace import (
    NEGLIGIBLE,
    RESIDENT,
    TOLERANCE,
    Row,
    Traced,
    Verification,
)

LAYERS = (2, 3, 4)
"""Layers of each part of a stage that are traced."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """A verification of the first rank of each stage that was traced."""

    each: dict[int, Verification]
    """By the number of the stage."""

    @property
    def agrees(self) -> bool:
        return all(found.agrees for found in self.each.values())

    @property
    def traced_peak(self) -> float:
        """Bytes on the rank that holds most."""
        return max(found.traced_peak for found in self.each.values())

    def summary(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        known = all(found.known for found in self.each.values())
        return {
            "agrees": self.agrees if known else None,
            "tolerance": TOLERANCE,
            "stages": {str(stage): found.summary() for stage, found in self.each.items()},
        }

    def page(self) -> str:
        """The tables as text."""
        return "\n\n".join(found.page() for found in self.each.values())


def stages_of(plan: Plan) -> list[int]:
    """Stages that are traced: both ends, and one between them."""
    last = plan.mesh.pipeline - 1
    return sorted({0, min(1, last), last})


def rank_of(plan: Plan, stage: int) -> int:
    """The rank that is traced: a stage's first, but of a ring the last, which holds most."""
    return stage * plan.processes // plan.mesh.pipeline + plan.backend.axes.ring - 1


def layers_at(plan: Plan, stage: int, layers: int) -> int:
    """Layers of a stage, of so many of the whole model."""
    spans = schedules.spans(layers, plan.backend.axes)
    return sum(len(spans[part]) for part in schedules.parts_of(stage, plan.backend.axes))


def compare(
    traced: Traced, workload: Workload | None, plan: Plan, stage: int, notes: Sequence[str]
) -> Verification:
    """Put formulas beside the trace of a stage; without a workload there is only the trace."""
    here = None if workload is None else memory.at_stage(workload, stage)
    timeline = None if here is None else memory.timeline(here)
    predicted: dict[str, float] = {}
    moments: dict[str, float] = {}
    if timeline is not None:
        parts = timeline.moments[-1].parts
        predicted = {name: parts.get(name, 0.0) for name in (*RESIDENT, "gradients")}
        predicted["peak"] = timeline.peak.total
        moments = {moment.name: moment.total for moment in timeline.moments}
    found = {**traced.held, "gradients": traced.gradients, "peak": traced.peak[1]}
    rows = [
        Row(name, None if timeline is None else predicted[name], count, scale=traced.peak[1])
        for name, count in found.items()
        if count or predicted.get(name)
    ]
    rows += _sent(traced, here)
    place = f"rank {rank_of(plan, stage)} of {plan.processes}"
    if plan.mesh.pipeline > 1:
        place += f", stage {stage} of {plan.mesh.pipeline}"
    how = (
        f"a step of the real model with fake tensors on {place}; {', '.join(map(str, LAYERS[:-1]))}"
        f" and {LAYERS[-1]} layers, extrapolated"
    )
    return Verification(tuple(rows), traced, moments, how, tuple(notes))


def _sent(traced: Traced, here: Workload | None) -> list[Row]:
    """Bytes of the tensors of a step's collectives by axis; those of a sum of numbers left out."""
    payloads = {} if here is None else traffic.payloads(here)
    wanted = {
        f"{axis} {kind}": size for axis, kinds in payloads.items() for kind, size in kinds.items()
    }
    counted = {kind.replace("_", "-"): size for kind, size in traced.payload.items()}
    scale = sum(counted.values())
    return [
        Row(name, wanted.get(name, 0.0) if here else None, counted.get(name, 0.0), scale=scale)
        for name in sorted({*wanted, *counted})
        if max(wanted.get(name, 0.0), counted.get(name, 0.0)) > NEGLIGIBLE**2 * scale
    ]
