"""Enumerate backends that divide a model, with the axis sizes worth predicting."""

import dataclasses
import functools
import math
from collections.abc import Iterator

from finetune import backend as backends
from finetune.backend import Backend, Precision
from finetune.planner.estimate.hardware import Machine
from finetune.planner.shapes.architecture import Architecture

WAITS = 0.1
"""Maximum pipeline bubble, as a fraction of a step, of a proposed backend."""
STAGES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of pipeline stages: powers of two, and three times powers of two."""
WAYS = (2, 4, 8, 16)
"""Numbers of processes that split each layer, or the tokens of a row."""


def candidates(shape: Architecture, machine: Machine, precision: Precision) -> Iterator[Backend]:
    """Every backend that divides the model and fits the processes and links of a machine.

    Layers and tokens are split by powers of two within a node whose GPUs are connected by NVLink;
    the sizes for layers divide the number of heads. The number of stages divides the number of
    processes, and experts stay within a node. The remaining processes are data parallel, with
    FSDP2.
    """
    known, load, count = backends.names(), functools.cache(backends.load), machine.count
    for name, sizes in (*_expert_divisions(shape, machine), *_sizes(shape, machine)):
        inner = math.prod(sizes.values())
        named = name if "experts" in sizes or inner == count else f"{name}_fsdp"
        if named in known and ("experts" in sizes or not count % inner):
            found, _ = backends.divided(load(named), count, sizes)
            yield dataclasses.replace(found, precision=precision)


def _expert_divisions(
    shape: Architecture, machine: Machine
) -> Iterator[tuple[str, dict[str, int]]]:
    """Backends that divide experts, and their axis sizes."""
    if shape.experts is None:
        return
    for size in WAYS:
        if size > machine.per_node or shape.experts.count % size or machine.count % size:
            continue
        yield "ep_fsdp", {"experts": size}
        if size == machine.count:
            yield "ep_tp", {"tensor": size, "experts": size}


def _sizes(shape: Architecture, machine: Machine) -> Iterator[tuple[str, dict[str, int]]]:
    """Backends without FSDP2, and their axis sizes."""
    ways = [size for size in WAYS if machine.fast and size <= machine.per_node]
    tensor = [size for size in ways if not (shape.heads % size or shape.kv_heads % size)]
    shared = [size for size in ways if not shape.heads % size]
    stages = [size for size in STAGES if size <= shape.layers]
    for size in tensor:
        yield "tp", {"tensor": size}
        yield from (("pp_tp", {"pipeline": count, "tensor": size}) for count in stages)
        inside = [count for count in shared if count * size <= machine.per_node]
        yield from (("sp_tp", {"sequence": count, "tensor": size}) for count in inside)
    yield from (("pp", {"pipeline": count}) for count in stages)
    yield from (("sp", {"sequence": size}) for size in shared)
    yield from (("cp", {"context": size}) for size in ways)


def slow_links(tensor: int, per_node: int, fast: bool) -> list[str]:
    """Why these links are too slow for tensor parallelism, with its all-reduces in every layer.

    Args:
        per_node: GPUs per node.
        fast: whether the GPUs of a node are connected by NVLink or a similar link.
    """
    problems: list[str] = []
    if tensor > per_node:
        problems.append(
            f"layout: tensor parallel over {tensor} GPUs, but a node has {per_node}; its "
            "all-reduces in every layer must not leave the node"
        )
    if tensor > 1 and not fast:
        problems.append(
            "layout: tensor parallel needs NVLink between the GPUs of a node; use fsdp_full_shard"
        )
    return problems
