"""Draw the pages' pictures as SVG, with the colors of a page's style sheet.

Curves over the steps of a run; processes of a mesh, memory by stage, and a pipeline's schedule.

height ^  ticks at 1, 2 or 5 times a power of ten
       |  raw     every value, or the minimum and maximum of each bucket of steps
       |  smooth  mean over a window around each step
       +----------------> step
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from markupsafe import Markup, escape

from finetune.backend.axes import Axes
from finetune.planner import schedules
from finetune.planner.estimate.moments import Moment
from finetune.planner.estimate.wording import size as large
from finetune.planner.mesh import Mesh
from finetune.runs.metrics import History

Point = tuple[float, float]
"""(step, value)"""
Size = Literal["wide", "small"]

WIDTHS: Mapping[Size, tuple[int, int]] = {"wide": (940, 330), "small": (460, 210)}
"""Width and height of a drawing of curves, in SVG units."""
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 58, 24, 12, 30
BUCKETS = 400
"""Buckets of a curve, each with at most two points: the resolution of a screen."""
MANY = 40
"""Number of values from which a smoothed curve is shown as well."""
WIDTH = 940
"""Width of the drawings of a plan."""
IN_A_LINE = 6
"""Maximum stages per line."""
ACROSS, DOWN = 8, 4
"""Maximum processes drawn per stage, along the axes within a group and over groups."""
PARTS = (
    "weights", "adapters", "optimizer", "gradients", "units", "hand-overs", "activations", "loss",
    "casts", "buckets", "reduction", "inputs", "update", "teacher",
)  # fmt: skip
"""Components of a moment's memory, in stacking order."""
PART_WORDS: Mapping[str, str] = {
    "units": "gathered weights",
    "hand-overs": "tensors between stages",
    "casts": "weights in 16 bits",
    "reduction": "gradients being reduced",
}
"""Names of components in legends, where they differ."""
SHOWN_SLOTS = 12
"""Micro-batches drawn of a schedule; further ones repeat the pattern."""
NAMES: Mapping[schedules.Kind, str] = {
    "F": "forward pass",
    "B": "backward pass",
    "I": "backward pass, of inputs",
    "W": "backward pass, of weights",
}
"""Kinds of passes in the schedule."""


# Shapes -------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes as text; small numbers in kB."""
    return large(count) if count >= 1e7 else f"{count / 1e3:,.0f} kB"


def drawing(width: int, height: float, parts: Iterable[str], label: str) -> Markup:
    """An `<svg>` of shapes, which consist of numbers and of escaped text."""
    return Markup(
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: object, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, wide: float, high: float, kind: str, about: str = "") -> str:
    inside = f"<title>{escape(about)}</title>" if about else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="2" '
        f'class="{kind}">{inside}</rect>'
    )


# Curves -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line or one set of dots."""

    name: str
    points: Sequence[Point]
    look: Literal["raw", "smooth", "dots"]
    colour: int | None = None
    """Index of a color, to distinguish curves of the same look."""

    @property
    def kind(self) -> str:
        """CSS classes of the curve."""
        return self.look if self.colour is None else f"{self.look} colour-{self.colour}"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing of curves with its name; `legend` has the curves to list in a legend."""

    name: str
    size: Size
    drawing: Markup
    legend: Sequence[Curve] = ()


def chart(
    name: str,
    curves: Sequence[Curve],
    *,
    size: Size = "small",
    show: Callable[[float], str] = "{:.4g}".format,
    best: Point | None = None,
    from_zero: bool = False,
    over: str = "step",
) -> Chart:
    """The chart of those curves that have a finite value; its drawing is empty if none has.

    `show` formats values at the axis and in tooltips, `over` names the horizontal axis; the point
    `best` is marked with a ring.
    """
    curves = [curve for curve in curves if finite(curve.points)]
    drawn = Markup()
    if points := [point for curve in curves for point in finite(curve.points)]:
        frame = _frame(points, size, from_zero)
        parts = [*_axes(frame, show, over)]
        for curve in curves:
            parts += _shapes(frame, curve, show)
        if best is not None:
            parts.append(_dot(*frame.place(best), 7, "best"))
        drawn = drawing(frame.width, frame.height, parts, name)
    alone = [curve.name for curve in curves] == [name]
    return Chart(name, size, drawn, () if alone else curves)


def loss_curves(history: History) -> list[Curve]:
    """The loss in training, smoothed as well if there are many steps, and in evaluations."""
    losses: list[Point] = [(record.step, record.loss) for record in history.trained]
    measured: list[Point] = [(record.step, record.loss) for record in history.evaluated]
    many = len(losses) >= MANY
    return [
        Curve("training loss", losses, "raw" if many else "smooth"),
        *([Curve("smoothed", smooth(losses), "smooth")] if many else []),
        Curve("evaluation loss", measured, "dots"),
    ]


def finite(points: Sequence[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving average of the finite values, over a window of a twentieth of all points."""
    kept = finite(points)
    reach = len(kept) // 40
    sums = [0.0]
    for _, value in kept:
        sums.append(sums[-1] + value)
    smoothed = []
    for index, (step, _) in enumerate(kept):
        low, high = max(0, index - reach), min(len(kept), index + reach + 1)
        smoothed.append((step, (sums[high] - sums[low]) / (high - low)))
    return smoothed


def thin(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """At most two points per bucket, its minimum and maximum, so that no spike is lost."""
    if len(points) <= 2 * buckets:
        return list(points)
    thinned: list[Point] = []
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        thinned += sorted({low, high})
    return thinned


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    span = high - low
    power = 10 ** math.floor(math.log10(span / most))
    apart = next(m * power for m in (1, 2, 5, 10, 20) if span / (m * power) <= most - 1)
    first = math.ceil(low / apart - 1e-9)
    last = math.floor(high / apart + 1e-9)
    return [index * apart for index in range(first, last + 1)]


@dataclasses.dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    steps: Point
    values: Point

    def place(self, point: Point) -> Point:
        across = (point[0] - self.steps[0]) / (self.steps[1] - self.steps[0])
        up = (point[1] - self.values[0]) / (self.values[1] - self.values[0])
        x = MARGIN_LEFT + across * (self.width - MARGIN_LEFT - MARGIN_RIGHT)
        y = self.height - MARGIN_BOTTOM - up * (self.height - MARGIN_TOP - MARGIN_BOTTOM)
        return x, y


def _frame(points: Sequence[Point], size: Size, from_zero: bool) -> _Frame:
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = min(0.0, low) if from_zero else low
    constant = abs(high) / 2 or 1.0  # padding that centers a constant curve
    pad = 0.05 * (high - low) if high > low else constant
    bottom = low if low == 0 and (high == 0 or from_zero) else low - pad
    width, height = WIDTHS[size]
    last = last if last > first else first + 1
    return _Frame(width, height, (first, last), (bottom, high + pad))


def _axes(frame: _Frame, show: Callable[[float], str], over: str) -> Iterator[str]:
    left, right = MARGIN_LEFT, frame.width - MARGIN_RIGHT
    bottom = frame.height - MARGIN_BOTTOM
    for value in ticks(*frame.values, most=6):
        _, y = frame.place((frame.steps[0], value))
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
        yield text(left - 8, y + 4, show(value), "value")
    for step in ticks(*frame.steps, most=frame.width // 80):
        whole = step == round(step)
        if whole or over != "step":
            x, _ = frame.place((step, frame.values[0]))
            yield text(x, bottom + 20, f"{step:,.0f}" if whole else f"{step:.4g}", "step")
    yield text(left - 22, bottom + 20, over, "value")
    yield f'<path class="axis" d="M{left} {bottom}H{right}"/>'


def _shapes(frame: _Frame, curve: Curve, show: Callable[[float], str]) -> Iterator[str]:
    """A line through the points, and a dot for each point of `dots` or for a single point."""
    points = finite(curve.points)
    if curve.look == "dots" or len(points) > 1:
        places = (frame.place(point) for point in thin(points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="{curve.kind}" points="{path}"/>'
    if curve.look == "dots" or len(points) == 1:
        for step, value in points:
            about = f"{curve.name} at step {step:,.0f}: {show(value)}"
            yield _dot(*frame.place((step, value)), 3.5, curve.kind, about)


def _dot(x: float, y: float, radius: float, kind: str, about: str = "") -> str:
    inside = f"<title>{escape(about)}</title>" if about else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{inside}</circle>'


# A plan -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawings:
    """A plan, and what was measured of it, to draw on a page."""

    axes: Axes
    shape: Mesh
    layers: int
    """Number of layers of the model."""
    sent: Mapping[str, float]
    """Bytes sent by a process in a step, by axis."""
    count: int
    """Micro-batches in a step."""
    per_node: int
    """Processes per node."""
    peaks: Sequence[Moment]
    """Each stage's planned peak; empty if the model has no formulas."""
    usable: float | None = None
    """Bytes available for tensors, drawn as a line; None draws no line."""
    measured: Sequence[int] = ()
    """Measured peak bytes of each stage; empty without a measurement."""

    def mesh(self) -> Markup:
        """Every stage with its layers and processes, and the bytes sent between stages."""
        axes, shape = self.axes, self.shape
        spans = schedules.spans(self.layers, axes)
        line = min(IN_A_LINE, axes.pipeline)
        wide = WIDTH / line
        inner = shape.sequence * shape.tensor
        across, down = min(ACROSS, inner), min(DOWN, shape.data)
        cell = min(26.0, (wide - 56) / across)
        high = 66 + down * cell + (14 if shape.data > down else 0) + 26

        def parts() -> Iterator[str]:
            for stage in range(axes.pipeline):
                left, top = stage % line * wide, stage // line * high
                numbers = schedules.parts_of(stage, axes)
                room = wide - 40 if axes.pipeline > 1 else wide - 8
                yield box(left + 4, top + 4, room, high - 18, "stage")
                yield text(left + 14, top + 24, f"stage {stage}", "name")
                first = stage * shape.processes // axes.pipeline
                last = first + shape.processes // axes.pipeline - 1
                yield text(left + room - 6, top + 24, f"ranks {first} to {last}", "value tiny")
                held = ", ".join(schedules.span_words(spans[number]) for number in numbers)
                ends = ["embedding"] * (0 in numbers) + ["head"] * (len(spans) - 1 in numbers)
                yield text(left + 14, top + 40, f"layers {held}")
                yield text(left + 14, top + 54, " + ".join(ends))
                yield from self._processes(stage, (left + 14, top + 64), cell)
                if stage + 1 < axes.pipeline and (stage + 1) % line:
                    x, y = left + wide - 36, top + 40
                    yield f'<path class="link" d="M{x:.1f} {y:.1f}h30m-6 -4l6 4l-6 4"/>'
                    yield text(x + 14, y - 8, size(self.sent.get("pipeline", 0.0)), "middle tiny")

        rows = -(-axes.pipeline // line)
        return drawing(WIDTH, rows * high, parts(), "which process holds what")

    def _processes(self, stage: int, corner: tuple[float, float], cell: float) -> Iterator[str]:
        """The processes of a stage, one line per group that reads its own rows."""
        shape, (left, top) = self.shape, corner
        inner = shape.sequence * shape.tensor
        across, down = min(ACROSS, inner), min(DOWN, shape.data)
        first = stage * shape.data * inner
        for group in range(down):
            for place in range(across):
                rank = first + group * inner + place
                x, y = left + place * cell, top + group * cell
                node = "even" if rank // self.per_node % 2 == 0 else "odd"
                about = f"rank {rank}: {shape.where(rank)}"
                yield box(x, y, cell - 2, cell - 2, f"process {node}", about)
                if cell > 6 * len(str(rank)) + 3:
                    yield text(x + cell / 2 - 1, y + cell / 2 + 3, rank, "rank")
        more = list[str]()
        if inner > across:
            more.append(f"{inner} in a line")
        if shape.data > down:
            more.append(f"{shape.data} lines")
        if more:
            yield text(left, top + down * cell + 11, "... " + ", ".join(more))

    def memory(self) -> Markup:
        """Stacked bars of each stage's peak memory by component, with marks for measured peaks."""
        peaks, measured, usable = self.peaks, self.measured, self.usable
        largest = max([moment.total for moment in peaks] + list(map(float, measured)))
        limit = usable if usable is not None and usable < 4 * largest else None
        scale = (WIDTH - 330) / max(largest, limit or 0.0)
        high = 30.0

        def parts() -> Iterator[str]:
            for stage, moment in enumerate(peaks):
                y, x = stage * high + 4, 70.0
                yield text(0, y + 15, f"stage {stage}" if len(peaks) > 1 else "each")
                for name in PARTS:
                    count = moment.parts.get(name, 0.0)
                    if not count:
                        continue
                    about = f"{PART_WORDS.get(name, name)}: {size(count)}"
                    yield box(x, y, count * scale, high - 10, f"part {name}", about)
                    x += count * scale
                label = size(moment.total)
                if measured:
                    at = 70 + measured[stage] * scale
                    yield f'<path class="measured" d="M{at:.1f} {y - 3:.1f}v{high - 4:.1f}"/>'
                    label += f", measured {size(measured[stage])}"
                    x = max(x, at)
                yield text(x + 8, y + 15, label if measured else f"{label}, {moment.name}")
            if limit is not None:
                at, bottom = 70 + limit * scale, len(peaks) * high + 4
                yield f'<path class="limit" d="M{at:.1f} 0v{bottom:.1f}"/>'
                yield text(at - 4, bottom + 12, f"{size(limit)} usable", "value")

        return drawing(WIDTH, len(peaks) * high + 20, parts(), "memory by stage")

    def parts(self) -> list[tuple[str, str]]:
        """Components of `memory` that are large enough to be visible, and their names."""
        largest = max(moment.total for moment in self.peaks)
        seen = [n for n in PARTS if max(m.parts.get(n, 0.0) for m in self.peaks) > largest / 200]
        return [(name, PART_WORDS.get(name, name)) for name in seen]

    def schedule(self) -> Markup:
        """Timeline of each stage's passes over its micro-batches; gaps are waiting time."""
        axes, lines = self.axes, schedules.timed(self.axes, self._drawn())
        end = max(line[-1].end for line in lines)
        scale, high = (WIDTH - 70) / end, 26.0 if axes.pipeline <= 8 else 18.0
        parts = axes.pipeline * axes.chunks

        def shapes() -> Iterator[str]:
            for stage, line in enumerate(lines):
                y = stage * high
                yield text(0, y + high / 2 + 4, f"stage {stage}")
                yield box(70, y + 2, end * scale, high - 4, "waits")
                for slot in line:
                    task, wide = slot.task, (slot.end - slot.start) * scale
                    second = " later" if axes.chunks > 1 and task.part >= parts / 2 else ""
                    x = 70 + slot.start * scale
                    about = f"{NAMES[task.kind]}, micro-batch {task.micro}, part {task.part}"
                    yield box(x, y + 2, wide - 1, high - 4, f"task {task.kind}{second}", about)
                    if wide > 12:
                        yield text(x + wide / 2, y + high / 2 + 4, task.micro, "rank")

        return drawing(WIDTH, axes.pipeline * high, shapes(), "the schedule of a step")

    def _drawn(self) -> int:
        """Number of a step's micro-batches that `schedule` draws."""
        shown = min(self.count, max(SHOWN_SLOTS, 2 * self.axes.pipeline))
        return shown - shown % self.axes.pipeline if self.axes.chunks > 1 else shown

    def about(self) -> str:
        """Caption of `schedule`."""
        shown = self._drawn()
        part = f"Only {shown} of {self.count} micro-batches are drawn, with a larger bubble. "
        left_out = part if shown < self.count else ""
        return f"{left_out}A backward pass counts as two forward passes."

    def kinds(self) -> list[tuple[str, str]]:
        """Kinds of passes in the schedule and their names."""
        halves = self.axes.schedule == "ZBVZeroBubble"
        return [(kind, NAMES[kind]) for kind in NAMES if kind == "F" or (kind != "B") == halves]
