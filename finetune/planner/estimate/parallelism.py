"""Arithmetic of tensor x pipeline x data parallel layouts: memory and pipeline bubble."""

import dataclasses

from finetune.errors import FinetuneError
from finetune.planner.shapes.architecture import Architecture


def bubble(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Fraction of a step in which a pipeline stage is idle (arXiv:2104.04473, section 2.2).

    (p - 1) / (v m + p - 1) for p stages, v model chunks per stage and m micro-batches.
    """
    return (stages - 1) / (virtual * microbatches + stages - 1)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tensor x pipeline x data parallel grid of processes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1
    """Model chunks per pipeline stage."""

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


def check(grid: Grid, shape: Architecture, processes: int, per_node: int, fast: bool) -> None:
    """Reject a layout that cannot run.

    Args:
        per_node: GPUs per node.
        fast: whether the GPUs of a node are connected by NVLink or a similar link.

    Raises:
        FinetuneError: contains every reason, with the numbers.
    """
    problems: list[str] = []
    if grid.processes != processes:
        problems.append(
            f"layout: {grid.tensor} x {grid.pipeline} x {grid.data} = {grid.processes}, "
            f"but there are {processes} GPUs"
        )
    if shape.heads % grid.tensor:
        problems.append(f"layout: {shape.heads} heads do not divide over {grid.tensor} GPUs")
    elif shape.kv_heads % grid.tensor and grid.tensor % shape.kv_heads:
        problems.append(f"layout: {shape.kv_heads} key heads do not divide over {grid.tensor} GPUs")
    problems += slow_links(grid.tensor, per_node, fast)
    if shape.layers < grid.pipeline:
        problems.append(f"layout: {shape.layers} layers do not fill {grid.pipeline} stages")
    if problems:
        raise FinetuneError(*problems)


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


@dataclasses.dataclass(frozen=True)
class GridMemory:
    """Bytes on one GPU of a 3D parallel layout."""

    states: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits


def grid_memory(
    grid: Grid, shape: Architecture, rows: int, length: int, microbatches: int, kept: float
) -> GridMemory:
    """Memory on a GPU of the first pipeline stage, where it is largest.

    In mixed precision, with the optimizer sharded over the data parallel group (ZeRO-1). The first
    stage has as many micro-batches in flight as there are stages.

    Args:
        kept: bytes of activations per layer and micro-batch without tensor parallelism.
    """
    per_stage = -(-shape.layers // grid.pipeline)
    outer = shape.outer_parameters / (1 if grid.pipeline == 1 else 2)
    held = (per_stage * shape.layer_parameters + outer) / grid.tensor
    states = held * (2 + 2 + 12 / grid.data)
    flying = min(grid.pipeline, microbatches)
    activations = per_stage * flying * kept / grid.tensor
    logits = 12.0 * rows * length * shape.vocab / grid.tensor
    return GridMemory(states, activations, logits)
