"""Pipeline schedules: the order and timing of the tasks of each stage.

The schedules are those of `torch.distributed.pipelining` 2.13 with the same names: GPipe
(arXiv:1811.06965), 1F1B and Interleaved1F1B (arXiv:2104.04473), ZBVZeroBubble (arXiv:2401.10241).
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from finetune.backend.axes import Axes

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; or the two halves of a backward pass, for the input and for the weights."""
EVEN: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Usual duration of each kind of task, in forward passes of a part of the model."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One forward or backward pass of a micro-batch through a part of the model."""

    kind: Kind
    part: int
    """Index of the part; part 0 has the embeddings."""
    micro: int
    """Index of the micro-batch in the step."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A task with its start and end time."""

    task: Task
    start: float
    end: float


def parts_of(stage: int, axes: Axes) -> list[int]:
    """Indices of the model parts on a stage.

    Two parts per stage are placed in a ring (`Interleaved1F1B`: 0 2, 1 3) or in a V
    (`ZBVZeroBubble`: 0 3, 1 2).
    """
    if axes.chunks == 1:
        return [stage]
    ranks = axes.pipeline
    second = 2 * ranks - 1 - stage if axes.schedule == "ZBVZeroBubble" else stage + ranks
    return [stage, second]


def spans(count: int, axes: Axes) -> list[range]:
    """Layers of each part, as even as possible; the last parts have fewer, next to the head."""
    parts = axes.pipeline * axes.chunks
    base, more = divmod(count, parts)
    starts = [part * base + min(part, more) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def span_words(span: range) -> str:
    """A range of layers as text, such as `0 to 19`."""
    return f"{span.start}" if len(span) == 1 else f"{span.start} to {span.stop - 1}"


def order(stage: int, axes: Axes, count: int) -> list[Task]:
    """The ordered tasks of one stage for `count` micro-batches."""
    if axes.schedule == "ZBVZeroBubble":
        return _v(stage, axes, count)
    if axes.schedule == "GPipe":
        ahead = count
    elif axes.chunks == 1:
        ahead = min(count, axes.pipeline - stage) - 1
    else:
        rounds = max(1, count // axes.pipeline)
        ahead = (axes.chunks - 1) * (count // rounds) + 2 * (axes.pipeline - 1 - stage)
    return _one_forward_one_backward(stage, axes, count, ahead)


def _one_forward_one_backward(stage: int, axes: Axes, count: int, ahead: int) -> list[Task]:
    """`ahead` forward passes, then alternating forward and backward passes, then the rest."""
    total, parts = axes.chunks * count, parts_of(stage, axes)
    each = count // max(1, count // axes.pipeline) if axes.chunks > 1 else count
    seen: dict[tuple[Kind, int], int] = {}

    def task(kind: Kind, number: int) -> Task:
        place = number // each % axes.chunks
        part = parts[place if kind == "F" else -1 - place]
        micro = seen[kind, part] = seen.get((kind, part), -1) + 1
        return Task(kind, part, micro)

    ahead = min(ahead, total)
    found = [task("F", number) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            found.append(task("F", ahead + number))
        found.append(task("B", number))
    return found


def _v(stage: int, axes: Axes, count: int) -> list[Task]:
    """ZBV (arXiv:2401.10241, section 6): the two halves of a backward pass are separate tasks."""
    size, (down, up) = axes.pipeline, parts_of(stage, axes)
    whole = max(2 * size - 1, count)
    found: list[Task] = []
    done = dict.fromkeys(((k, p) for k in ("F", "I", "W") for p in (down, up)), 0)

    def add(part: int, *kinds: Kind) -> None:
        for kind in kinds:
            found.append(Task(kind, part, done[kind, part]))
            done[kind, part] += 1

    for _ in range(2 * (size - stage) - 1):
        add(down, "F")
    for _ in range(stage):
        add(up, "F")
        add(down, "F")
    for _ in range(size - stage):
        add(up, "F", "I", "W")
    while done["F", up] < done["F", down] or done["F", down] < whole:
        if done["F", down] < whole:
            add(down, "F")
        add(down, "I", "W")
        add(up, "F", "I", "W")
    for _ in range(stage):
        add(down, "I")
        add(up, "I")
    for _ in range(size - stage):
        add(down, "I", "W")
    for part in (up, down):
        while done["W", part] < done["I", part]:
            add(part, "W")
    return [task for task in found if task.micro < count]


def timed(axes: Axes, count: int, cost: Mapping[Kind, float] = EVEN) -> list[list[Slot]]:
    """The slots of every stage; each task starts as soon as its inputs are available.

    Args:
        count: number of micro-batches in the step.
        cost: duration of each kind of task; communication takes no time.
    """
    waiting = [order(stage, axes, count)[::-1] for stage in range(axes.pipeline)]
    found: list[list[Slot]] = [[] for _ in waiting]
    ended: dict[Task, float] = {}
    last = axes.pipeline * axes.chunks - 1
    while any(waiting):
        moved = False
        for stage, left in enumerate(waiting):
            while left and (ready := _ready(left[-1], ended, last)) is not None:
                task, slots = left.pop(), found[stage]
                start = max(ready, slots[-1].end if slots else 0.0)
                ended[task] = start + cost[task.kind]
                slots.append(Slot(task, start, ended[task]))
                moved = True
        assert moved, "a schedule whose tasks wait for one another"
    return found


def _ready(task: Task, ended: Mapping[Task, float], last: int) -> float | None:
    """Time when the inputs of a task are available; None if not known yet."""
    if task.kind == "F":
        return 0.0 if not task.part else ended.get(Task("F", task.part - 1, task.micro))
    if task.kind == "W":
        return ended.get(Task("I", task.part, task.micro))
    above = task.part + (task.part < last)
    kind: Kind = "F" if task.part == last else task.kind
    return ended.get(Task(kind, above, task.micro))


def bubble(axes: Axes, count: int) -> float:
    """Average fraction of a step in which a pipeline stage is idle.

    (p - 1) / (v m + p - 1) for p stages, v parts per stage and m micro-batches (arXiv:2104.04473,
    section 2.2). For ZBVZeroBubble it is counted from the slots, where each half of a backward
    pass takes as long as a forward pass.
    """
    p = axes.pipeline
    if p == 1:
        return 0.0
    if axes.schedule != "ZBVZeroBubble":
        return (p - 1) / (axes.chunks * count + p - 1)
    return waiting_share(timed(axes, count))


def waiting_share(slots: list[list[Slot]]) -> float:
    """Fraction of the time from the first to the last slot in which stages are idle."""
    span = max(s.end for line in slots for s in line) - min(s.start for line in slots for s in line)
    busy = sum(s.end - s.start for line in slots for s in line)
    return 1 - busy / (span * len(slots))


def enough(axes: Axes, share: float = 0.1) -> int:
    """Minimum number of micro-batches for a bubble below `share` of a step."""
    count = axes.pipeline
    while bubble(axes, count) >= share:
        count += axes.pipeline if axes.chunks > 1 else 1
    return count
