"""Bytes that one process sends per step along each axis of a mesh, and their time.

Collectives are rings, as in `communication`: in an all-gather or reduce-scatter of S bytes over N
processes, each process sends S(N - 1)/N, in an all-reduce twice as much.
"""

import dataclasses
from collections.abc import Mapping

from finetune.planner import schedules
from finetune.planner.estimate import stage_workload
from finetune.planner.estimate.communication import Volume, ring
from finetune.planner.estimate.hardware import EFFICIENCY, Machine
from finetune.planner.estimate.workload import Workload

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices that tensor parallelism splits by columns. transformers 5.23 all-reduces the input
gradient of each of them separately; outputs of matrices split by rows are all-reduced in the
forward pass. With an adapter, the same happens to the r values between its two matrices."""
INPUTS = COLUMNS[:3]
"""Matrices that read the input of a layer."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Communication of one process along one axis in a step."""

    axis: str
    sent: float
    """Bytes."""
    seconds: float
    crosses: bool
    """Whether some of it crosses between nodes."""


def payloads(workload: Workload) -> dict[str, dict[str, float]]:
    """Bytes of the tensors of all collectives of a step, by axis and collective.

    For a process on the stage `workload.layout.stage`. Tensors are counted at full size, after an
    all-gather or before a reduce-scatter; `send` is sent to the next or previous stage.
    """
    found: dict[str, dict[str, float]] = {}
    axes, here = workload.layout.axes, stage_workload.here(workload)
    steps = workload.accumulation
    stream = float(here.tokens * here.shape.hidden)
    if axes.tensor > 1:
        found["tensor"] = _tensor(workload, here, stream * steps)
        if axes.experts > 1:
            found["tensor"]["all-gather"] += _slices(here) * steps
    if axes.parts > 1:
        found["sequence"] = _sequence(workload, here)
    if axes.experts > 1:
        found["experts"] = _experts(workload, here)
    if axes.pipeline > 1:
        numbers, last = schedules.parts_of(workload.layout.stage, axes), axes.pipeline * axes.chunks
        forward = sum(n + 1 < last and n + 1 not in numbers for n in numbers)
        back = sum(n > 0 and n - 1 not in numbers for n in numbers)
        sent = (forward + back) * steps * stream * here.residual
        found["pipeline"] = {"send": sent}
        if workload.tied and {0, last - 1} & set(numbers) and not {0, last - 1} <= set(numbers):
            width = here.gradient_width / workload.layout.share("grads")
            found["pipeline"]["all-reduce"] = here.shape.embedding * width
    if workload.layout.group > 1:
        found["shard"] = _shard(workload, here)
    if workload.layout.replicas > 1:
        reduced = here.sharded * float(workload.gradient_width) / workload.layout.group
        found["replicate"] = {"all-reduce": reduced}
    return found


def _tensor(workload: Workload, here: Workload, stream: float) -> dict[str, float]:
    """All-reduces of layers, embedding and head, and the all-gather of logits.

    Every process has a complete score head.
    `stream` is the number of elements of the hidden states, over all micro-batches of a step.
    """
    shape, layout = here.shape, workload.layout
    width, residual = here.compute, here.residual
    names = {matrix.leaf for matrix in shape.matrices}
    ranks = {} if workload.adapter is None else dict(workload.adapter.ranks)
    rows = [name for name in stage_workload.ROWS if name in names]
    columns = [name for name in COLUMNS if name in names]
    forward, narrow = float(len(rows)), sum(ranks.get(name, 0) for name in rows)
    checkpointed = workload.recomputes
    if checkpointed:
        # A sum that neither a norm nor an adapter follows, only the residual stream, is not
        # computed again.
        forward += sum(n < shape.norms // 2 or name in ranks for n, name in enumerate(rows))
        narrow *= 2
    # Gradients have the type of what came in, which each product casts under autocast.
    backward = sum(ranks.get(name, 0) for name in columns) / shape.hidden + len(columns)
    sums = stream * shape.layers * ((forward + narrow / shape.hidden) * width + backward * residual)
    found = {"all-reduce": sums}
    spans = schedules.parts_of(layout.stage, layout.axes)
    if 0 in spans:
        found["all-reduce"] += stream * residual
        if ranks and not (checkpointed or here.trains("embedding")):
            # Nothing before the first layer needs the gradient of its input.
            found["all-reduce"] -= stream * residual * sum(name in INPUTS for name in columns)
    if layout.axes.pipeline * layout.axes.chunks - 1 in spans and not shape.scores:
        labelled = float(here.labelled_tokens * workload.accumulation)
        found["all-reduce"] += labelled * shape.hidden * residual
        found["all-gather"] = labelled * shape.vocab * shape.ways * width
    return found


def _sequence(workload: Workload, here: Workload) -> dict[str, float]:
    """Collectives that exchange the tokens of a row.

    Ulysses (arXiv:2309.14509): all-to-alls of queries, keys, values and outputs, and back. Context
    parallel (arXiv:2407.21783): all-gathers of keys and values, reduce-scatters of their gradients.
    Ring attention (arXiv:2310.01889): keys and values are sent N - 1 times in each pass, in the
    backward pass with their gradients in fp32.
    """
    shape, axes = here.shape, workload.layout.axes
    again = workload.recomputes
    if axes.ring > 1:
        own = here.tokens * 2.0 * shape.key * shape.layers * workload.accumulation
        width = (2 + again) * here.compute + 4
        return {"send": (axes.ring - 1) * own * width}
    if axes.context > 1:
        whole = axes.context * here.tokens * 2.0 * shape.key * here.compute
        whole *= shape.layers * workload.accumulation
        return {"all-gather": whole * (1 + again), "reduce-scatter": whole}
    keys = max(shape.kv_heads, axes.sequence) * shape.head_dim  # each process gets one at least
    each = here.tokens * (2.0 * shape.query + 2.0 * keys) * here.compute
    return {"all-to-all": each * shape.layers * workload.accumulation * (2 + again)}


def _experts(workload: Workload, here: Workload) -> dict[str, float]:
    """All-to-alls of tokens to their experts and back, and of their gradients.

    Assumes balanced routing: a process receives as many tokens as it sends.
    """
    shape = here.shape
    assert shape.experts is not None
    again = workload.recomputes
    chosen = here.tokens * shape.experts.active / shape.ways
    each = 2.0 * chosen * shape.hidden * here.residual
    return {"all-to-all": each * shape.layers * workload.accumulation * (2 + again)}


def _slices(here: Workload) -> float:
    """Bytes of a micro-batch's tokens that tensor parallel processes gather around the experts.

    Each sends its slice of the tokens to the experts. Their outputs are gathered, and so are the
    gradients of the tokens and of their routing weights. A checkpoint ends its second pass before.
    """
    shape, n = here.shape, here
    assert shape.experts is not None
    each = 2.0 * shape.hidden * n.residual + float(shape.experts.active * n.compute)
    return shape.layers * here.tokens * each


def _shard(workload: Workload, here: Workload) -> dict[str, float]:
    """FSDP2: all-gathers of units and reduce-scatters of gradients.

    A pipeline stage keeps its units gathered from a backward pass until the end of the next forward
    pass and reduces gradients once; it gathers embedding, norm and head once per step.
    """
    shape, layout = here.shape, workload.layout
    axes, unit = layout.axes, here.unit_bytes
    trained = float(here.sharded)
    if axes.experts > 1:
        # Only this process's experts count, and none of them if no other process has the same.
        each = here.divided_experts if workload.layout.expert_shards == 1 else 0.0
        unit -= each * here.compute
        if workload.adapter is None:
            inner = shape.layer_parameters - each
            trained = float(shape.layers * inner + shape.outer_parameters)
    reduced = trained * (here.gradient_width if here.scheme != "fsdp" else 4)
    layers, steps = shape.layers * unit, workload.accumulation
    if layout.axes.pipeline == 1:
        again = 2 * layers + here.outer_bytes
        reduces = steps if workload.synchronise_each else 1
        return {"all-gather": steps * again, "reduce-scatter": reduces * reduced}
    gathers, ready = dict.fromkeys(schedules.parts_of(layout.stage, layout.axes), 0), set[int]()
    for task in schedules.order(layout.stage, layout.axes, steps):
        if task.kind == "W":
            continue
        gathers[task.part] += task.part not in ready
        (ready.discard if task.kind == "F" else ready.add)(task.part)
    each = layers / len(gathers)
    gathered = each * sum(gathers.values()) + here.outer_bytes
    return {"all-gather": gathered, "reduce-scatter": reduced}


def sent(workload: Workload) -> dict[str, float]:
    """Bytes that a process sends per step, by axis."""
    axes, found = workload.layout.axes, dict[str, float]()
    sizes = {
        "tensor": axes.tensor,
        "sequence": axes.parts,
        "experts": axes.experts,
        "shard": workload.layout.group,
        "replicate": workload.layout.replicas,
    }
    for axis, kinds in payloads(workload).items():
        size = sizes.get(axis, 2)
        ways = {"all-reduce": 2 * ring(size), "send": 1.0}
        found[axis] = sum(count * ways.get(kind, ring(size)) for kind, count in kinds.items())
    return found


def volume(workload: Workload) -> Volume:
    """Bytes per step of the stage that sends most: the first, the last, or an inner one."""
    layout = workload.layout
    stages = sorted({0, min(1, layout.axes.pipeline - 1), layout.axes.pipeline - 1})
    places = [dataclasses.replace(layout, stage=stage) for stage in stages]
    each = [sent(dataclasses.replace(workload, layout=place)) for place in places]
    most = max(each, key=lambda found: sum(found.values()))
    return Volume(gradients=most.pop("shard", 0.0), between=most.pop("replicate", 0.0), axes=most)


def reaches(workload: Workload, axis: str) -> int:
    """Number of consecutive ranks that a group along an axis spans."""
    axes, layout = workload.layout.axes, workload.layout
    inside = {"tensor": axes.tensor, "sequence": axes.tensor * axes.parts}
    shard = axes.tensor * layout.group
    inside["experts"] = axes.experts
    known = inside | {"shard": shard, "replicate": shard * layout.replicas}
    return known.get(axis, shard * layout.replicas + 1)


def links(moved: Volume, workload: Workload, machine: Machine) -> list[Link]:
    """Bytes sent along each axis, with their time on the slowest link of the axis."""
    found, axes = list[Link](), workload.layout.axes
    for axis, count in by_axis(moved).items():
        crosses = machine.nodes > 1 and reaches(workload, axis) > machine.per_node
        inner = {"shard": axes.tensor, "replicate": axes.tensor * workload.layout.group}
        members = machine.per_node // inner.get(axis, machine.per_node)
        rate = machine.ring(members) if crosses else machine.link
        found.append(Link(axis, count, count / (rate * EFFICIENCY) if count else 0.0, crosses))
    return found


def by_axis(moved: Volume) -> Mapping[str, float]:
    """Bytes by axis, for axes with communication."""
    shards = {"shard": moved.inside, "replicate": moved.between}
    return {axis: count for axis, count in {**moved.axes, **shards}.items() if count}
