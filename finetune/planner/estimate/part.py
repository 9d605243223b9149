"""The part of a model on one process, as a separate workload."""

import dataclasses
import math

from finetune.planner import schedules
from finetune.planner.estimate.adapters import Adapter
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture, Matrix

ROWS = ("o_proj", "down_proj")
"""Matrices that tensor parallelism splits along their inputs; others along their outputs."""


@dataclasses.dataclass(frozen=True)
class Part(Architecture):
    """Shape of the part of a model on one process.

    Layers, heads, inner width, vocabulary and experts are counted per process; norms are not
    divided.
    """

    first: bool = True
    """Whether this part has the embedding."""
    last: bool = True
    """Whether this part has the final norm and the head."""
    expert_groups: int = 1
    """Number of groups with different experts among the processes that shard a layer."""

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
    """The workload of a single process, on the pipeline stage `workload.layout.stage`.

    A teacher and a reference are divided like the trained model.
    """
    found = _part(workload, workload.shape)
    teacher, reference = workload.teacher_shape, workload.reference_shape
    return dataclasses.replace(
        workload,
        shape=found,
        length=math.ceil(workload.length / workload.layout.axes.parts),
        adapter=None if workload.adapter is None else _adapter(workload, found),
        teacher_shape=None if teacher is None else _part(workload, teacher),
        reference_shape=None if reference is None else _part(workload, reference),
    )


def _part(workload: Workload, shape: Architecture) -> Part:
    """The part of a model on a single process."""
    axes = workload.layout.axes
    spans = schedules.spans(shape.layers, axes)
    numbers = schedules.parts_of(workload.layout.stage, axes)
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
        # The two ends of a pipeline have separate tables.
        "tied": shape.tied and first and last,
        "matrices": tuple(_cut(matrix, ways) for matrix in shape.matrices),
    }
    groups = 1
    if shape.experts is not None and axes.experts > 1:
        count, groups = shape.experts.count // axes.experts, max(1, axes.experts // ways)
        fields["experts"] = dataclasses.replace(shape.experts, count=count)
    return Part(**fields, first=first, last=last, expert_groups=groups)


def _cut(matrix: Matrix, ways: int) -> Matrix:
    if matrix.leaf in ROWS:
        return dataclasses.replace(matrix, inputs=-(-matrix.inputs // ways))
    return dataclasses.replace(matrix, outputs=-(-matrix.outputs // ways))


def _adapter(workload: Workload, found: Part) -> Adapter:
    """The adapter on the layers of this part; of a split matrix, either A or B is split."""
    given = workload.adapter
    assert given is not None
    total_rows = _by_rows(given, workload.shape)
    mine = _by_rows(given, found)
    share = found.layers / workload.shape.layers
    inside = (given.parameters - given.whole) / max(
        1, sum(total_rows.values()) * workload.shape.layers
    )
    parameters = round(inside * found.layers * sum(mine.values()))
    return dataclasses.replace(
        given,
        parameters=parameters + round(given.whole * share),
        whole=round(given.whole * share),
        rows={rows: round(inside * found.layers * count) for rows, count in mine.items()},
    )


def _by_rows(adapter: Adapter, shape: Architecture) -> dict[int, int]:
    """Adapter parameters in one layer, by the first dimension of their tensor."""
    found: dict[int, int] = {}
    for matrix in shape.matrices:
        r = adapter.ranks.get(matrix.leaf, 0)
        for rows, count in ((r, r * matrix.inputs), (matrix.outputs, r * matrix.outputs)):
            if r:
                found[rows] = found.get(rows, 0) + count
    return found
