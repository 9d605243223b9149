"""The part of a model on one process, as a separate workload."""

import dataclasses
import math

from finetune.planner import schedules
from finetune.planner.estimate.adapter_sizes import Adapter, by_rows
from finetune.planner.estimate.trained_share import Share
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture, Matrix

ROWS = ("o_proj", "down_proj")
"""Matrices that tensor parallelism splits along their inputs; others along their outputs."""


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
        share=None if workload.share is None else _share(workload, workload.share),
        adapter=None if workload.adapter is None else _adapter(workload, found),
        teacher_shape=None if teacher is None else _part(workload, teacher),
        reference_shape=None if reference is None else _part(workload, reference),
    )


def _part(workload: Workload, shape: Architecture) -> Architecture:
    """The part of a model on a single process."""
    axes = workload.layout.axes
    spans, ways = schedules.spans(shape.layers, axes), axes.tensor
    numbers = schedules.parts_of(workload.layout.stage, axes)
    first, last = 0 in numbers, len(spans) - 1 in numbers
    groups, experts = 1, shape.experts
    if experts is not None and axes.experts > 1:
        groups = max(1, axes.experts // ways)
        experts = dataclasses.replace(experts, count=experts.count // axes.experts)
    return dataclasses.replace(
        shape,
        layers=sum(len(spans[number]) for number in numbers),
        ways=ways,
        heads=shape.heads // ways,
        kv_heads=max(1, shape.kv_heads // ways),
        width=-(-shape.width // ways),
        vocab=-(-shape.vocab // ways),
        tied=shape.tied and first and last,  # the two ends of a pipeline have separate tables
        matrices=tuple(_cut(matrix, ways) for matrix in shape.matrices),
        experts=experts,
        first=first,
        last=last,
        expert_groups=groups,
    )


def _share(workload: Workload, whole: Share) -> Share:
    """What is trained of the layers of this stage; gradients of earlier ones enter it, too."""
    axes = workload.layout.axes
    spans = schedules.spans(workload.shape.layers, axes)
    numbers = schedules.parts_of(workload.layout.stage, axes)
    mine = [at for number in numbers for at in spans[number]]
    shares, skipped = tuple(whole.layers[at] for at in mine), sum(at < whole.skipped for at in mine)
    return dataclasses.replace(whole, layers=shares, skipped=skipped)


def _cut(matrix: Matrix, ways: int) -> Matrix:
    if matrix.leaf in ROWS:
        return dataclasses.replace(matrix, inputs=-(-matrix.inputs // ways))
    return dataclasses.replace(matrix, outputs=-(-matrix.outputs // ways))


def _adapter(workload: Workload, found: Architecture) -> Adapter:
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
    return by_rows((m, adapter.ranks[m.leaf]) for m in shape.matrices if adapter.ranks.get(m.leaf))
