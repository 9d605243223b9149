"""The part of a model that one process holds, as a workload of its own."""

import dataclasses
import math

from finetune.planner import schedules
from finetune.planner.estimate.workload import Adapter, Workload
from finetune.planner.shapes.architecture import Architecture, Matrix

ROWS = ("o_proj", "down_proj")
"""Matrices that tensor parallel cuts by what enters them; all others by what leaves."""


@dataclasses.dataclass(frozen=True)
class Part(Architecture):
    """What one process holds of a model's shape.

    Layers, heads, inner widths, vocabulary and experts are those of the process; norms are whole.
    """

    first: bool = True
    """Whether the embedding is here."""
    last: bool = True
    """Whether the last norm and the head are."""
    expert_groups: int = 1
    """Groups of other experts among the processes that shard a layer: they hold them together."""

    @property
    def held_layer(self) -> int:
        if self.experts is None:
            return self.layer_parameters
        each = self.experts.count * self.experts.weights(self.hidden)
        return self.layer_parameters + (self.expert_groups - 1) * each

    @property
    def outer_parameters(self) -> int:
        found = self.first * (self.embedding + self.positions * self.hidden)
        if not self.last:
            return found
        head = 0 if self.tied and not self.scores else self.head_weights
        return found + self.norm_size + head


def here(workload: Workload) -> Workload:
    """A workload of the process that `workload.layout` means: what one process computes."""
    layout, shape = workload.layout, workload.shape
    axes = layout.axes
    spans = schedules.spans(shape.layers, axes)
    numbers = schedules.parts_of(layout.stage, axes)
    first, last = 0 in numbers, len(spans) - 1 in numbers
    layers = sum(len(spans[number]) for number in numbers)
    ways = axes.tensor
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(Architecture)}
    fields |= {
        "layers": layers,
        "ways": ways,
        "heads": shape.heads // ways,
        "kv_heads": max(1, shape.kv_heads // ways),
        "width": -(-shape.width // ways),
        "vocab": -(-shape.vocab // ways),
        # Each end of a pipeline has a table of its own.
        "tied": shape.tied and first and last,
        "matrices": tuple(_cut(matrix, ways) for matrix in shape.matrices),
    }
    groups = 1
    if shape.experts is not None and axes.experts > 1:
        count, groups = shape.experts.count // axes.experts, max(1, axes.experts // ways)
        fields["experts"] = dataclasses.replace(shape.experts, count=count)
    found = Part(**fields, first=first, last=last, expert_groups=groups)
    length = math.ceil(workload.length / axes.parts)
    return dataclasses.replace(
        workload,
        shape=found,
        length=length,
        adapter=None if workload.adapter is None else _adapter(workload, found),
    )


def _cut(matrix: Matrix, ways: int) -> Matrix:
    if matrix.leaf in ROWS:
        return dataclasses.replace(matrix, inputs=-(-matrix.inputs // ways))
    return dataclasses.replace(matrix, outputs=-(-matrix.outputs // ways))


def _adapter(workload: Workload, found: Part) -> Adapter:
    """The adapter of the layers that are here; of a matrix that is cut, one of its two is."""
    given = workload.adapter
    assert given is not None
    whole = _by_rows(given, workload.shape)
    mine = _by_rows(given, found)
    share = found.layers / workload.shape.layers
    inside = (given.parameters - given.whole) / max(1, sum(whole.values()) * workload.shape.layers)
    parameters = round(inside * found.layers * sum(mine.values()))
    return dataclasses.replace(
        given,
        parameters=parameters + round(given.whole * share),
        whole=round(given.whole * share),
        rows={rows: round(inside * found.layers * count) for rows, count in mine.items()},
    )


def _by_rows(adapter: Adapter, shape: Architecture) -> dict[int, int]:
    """Parameters in one layer, by the first dimension of their tensor."""
    found: dict[int, int] = {}
    for matrix in shape.matrices:
        r = adapter.ranks.get(matrix.leaf, 0)
        for rows, count in ((r, r * matrix.inputs), (matrix.outputs, r * matrix.outputs)):
            if r:
                found[rows] = found.get(rows, 0) + count
    return found
