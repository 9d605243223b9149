"""Draw a run's mesh: placement on processes, planned and measured memory, the schedule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from finetune.backend.axes import Axes
from finetune.planner import schedules
from finetune.planner.estimate.moments import Moment
from finetune.planner.mesh import AXES, Mesh
from finetune.reports import mesh_drawings as draw
from finetune.runs.metrics import History
from finetune.runs.run import Run, read_object


@dataclasses.dataclass(frozen=True)
class Drawings:
    """Drawings of a run's processes for its page."""

    mesh: Markup
    memory: Markup | None
    """None if nothing was measured, or the model has no formulas."""
    parts: list[str]
    schedule: Markup | None
    """None without a pipeline."""
    schedule_words: str
    kinds: list[tuple[str, str]]


def drawings(run: Run, history: History) -> Drawings | None:
    """The drawings of a run's plan; None with one process or without a prediction."""
    plan = read_object(run.plan) if run.plan.is_file() else {}
    prediction = plan.get("prediction") or {}
    if plan.get("processes", 1) < 2 or "layers" not in prediction:
        return None
    shape = Mesh(**{axis: plan["mesh"].get(axis, 1) for axis in (*AXES, "experts")})
    axes = Axes(
        pipeline=shape.pipeline,
        sequence=shape.sequence,
        tensor=shape.tensor,
        experts=shape.experts,
        schedule=plan.get("schedule", "1F1B"),
    )
    peaks, memory = _peaks(history), None
    if peaks:
        counted = history.measured[-1].peaks
        each = len(counted) // len(peaks)
        fullest = [max(counted[at * each : (at + 1) * each]) for at in range(len(peaks))]
        memory = draw.memory(peaks, None, fullest)
    count, pipeline = plan["accumulation"], shape.pipeline > 1
    return Drawings(
        draw.mesh(axes, shape, prediction["layers"], prediction["sent"], shape.processes),
        memory,
        draw.parts_of(peaks) if peaks else [],
        draw.schedule(axes, count) if pipeline else None,
        _schedule_words(axes, count) if pipeline else "",
        draw.kinds(axes) if pipeline else [],
    )


def _peaks(history: History) -> list[Moment]:
    """The planned peak of each stage, for the measured micro-batch."""
    counted = history.measured[-1] if history.measured else None
    found: list[Mapping[str, Any]] = counted.parts if counted is not None else []
    return [Moment("", dict(parts)) for parts in found]


def _schedule_words(axes: Axes, count: int) -> str:
    """Caption with the bubble by the formula and the part of the step that is drawn."""
    waits = schedules.bubble(axes, count)
    return f"{axes.schedule}: a stage waits {waits:.1%} of a step. {draw.about(axes, count)}"
