"""Draw a plan on a mesh: placement on processes, memory by stage, the pipeline's schedule.

Each drawing is an SVG with the colors of the page's style sheet.
"""

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup, escape

from finetune.backend.axes import Axes
from finetune.planner import schedules
from finetune.planner.estimate.moments import Moment
from finetune.planner.estimate.page import size as large
from finetune.planner.estimate.predict import Prediction
from finetune.planner.mesh import AXES, Mesh

WIDTH = 940
IN_A_LINE = 6
"""Maximum stages per line of the drawing."""
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


def size(count: float) -> str:
    """Bytes as text; small numbers in kB."""
    return large(count) if count >= 1e7 else f"{count / 1e3:,.0f} kB"


def drawing(width: int, height: float, parts: Iterator[str], label: str) -> Markup:
    """An SVG of shapes whose text is already escaped."""
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


# The mesh ----------------------------------------------------------------------------------------


def mesh(axes: Axes, shape: Mesh, layers: int, sent: Mapping[str, float], per_node: int) -> Markup:
    """Every stage with its layers and processes, and the bytes sent between stages.

    Args:
        layers: number of layers of the model.
        sent: bytes sent by a process in a step, by axis.
        per_node: processes per node.
    """
    spans = schedules.spans(layers, axes)
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
            yield from _processes(shape, stage, (left + 14, top + 64), cell, per_node)
            if stage + 1 < axes.pipeline and (stage + 1) % line:
                x, y = left + wide - 36, top + 40
                yield f'<path class="link" d="M{x:.1f} {y:.1f}h30m-6 -4l6 4l-6 4"/>'
                yield text(x + 14, y - 8, size(sent.get("pipeline", 0.0)), "middle tiny")

    rows = -(-axes.pipeline // line)
    return drawing(WIDTH, rows * high, parts(), "which process holds what")


def _processes(
    shape: Mesh, stage: int, corner: tuple[float, float], cell: float, per_node: int
) -> Iterator[str]:
    """The processes of a stage, one line per group that reads its own rows."""
    inner, (left, top) = shape.sequence * shape.tensor, corner
    across, down = min(ACROSS, inner), min(DOWN, shape.data)
    first = stage * shape.data * inner
    for group in range(down):
        for place in range(across):
            rank = first + group * inner + place
            found = shape.place(rank)
            about = ", ".join(f"{a} {found[a]}" for a in AXES if getattr(shape, a) > 1)
            x, y = left + place * cell, top + group * cell
            node = "even" if rank // per_node % 2 == 0 else "odd"
            yield box(x, y, cell - 2, cell - 2, f"process {node}", f"rank {rank}: {about}")
            if cell > 6 * len(str(rank)) + 3:
                yield text(x + cell / 2 - 1, y + cell / 2 + 3, rank, "rank")
    more = list[str]()
    if inner > across:
        more.append(f"{inner} in a line")
    if shape.data > down:
        more.append(f"{shape.data} lines")
    if more:
        yield text(left, top + down * cell + 11, "... " + ", ".join(more))


# Memory ------------------------------------------------------------------------------------------


def memory(peaks: Sequence[Moment], usable: float | None, measured: Sequence[int] = ()) -> Markup:
    """Stacked bars of each stage's peak memory by component, with marks for measured peaks.

    Args:
        usable: bytes available for tensors, drawn as a line; None draws no line.
        measured: measured peak bytes of each stage; empty without a measurement.
    """
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


def parts_of(peaks: Sequence[Moment]) -> list[str]:
    """Components in the bars of `memory` that are large enough to be visible, in their order."""
    largest = max(moment.total for moment in peaks)
    return [n for n in PARTS if max(m.parts.get(n, 0.0) for m in peaks) > largest / 200]


# The schedule ------------------------------------------------------------------------------------


def schedule(axes: Axes, count: int) -> Markup:
    """Timeline of each stage's passes over `count` micro-batches; gaps are waiting time."""
    lines = schedules.timed(axes, drawn(axes, count))
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


def drawn(axes: Axes, count: int) -> int:
    """Number of a step's `count` micro-batches that `schedule` draws."""
    shown = min(count, max(SHOWN_SLOTS, 2 * axes.pipeline))
    return shown - shown % axes.pipeline if axes.chunks > 1 else shown


def about(axes: Axes, count: int) -> str:
    """Caption of `schedule`."""
    shown = drawn(axes, count)
    part = f"Only {shown} of {count} micro-batches are drawn, with a larger bubble. "
    return (part if shown < count else "") + "A backward pass counts as two forward passes."


NAMES: Mapping[schedules.Kind, str] = {
    "F": "forward pass",
    "B": "backward pass",
    "I": "backward pass, of inputs",
    "W": "backward pass, of weights",
}


def kinds(axes: Axes) -> list[tuple[str, str]]:
    """Kinds of passes in the schedule and their names."""
    halves = axes.schedule == "ZBVZeroBubble"
    return [(kind, NAMES[kind]) for kind in NAMES if kind == "F" or (kind != "B") == halves]


def peaks_of(prediction: Prediction) -> list[Moment]:
    return [found.peak for found in prediction.stages]
