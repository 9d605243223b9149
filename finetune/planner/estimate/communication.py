"""Bytes that a process sends per optimizer step with ring collectives.

In an all-gather or reduce-scatter of S bytes over N processes, each process sends S(N - 1)/N, in an
all-reduce twice as much (arXiv:1910.02054 section 7; NCCL's ring). Latency is not counted.
"""

import dataclasses
from collections.abc import Mapping

from finetune.planner.estimate.layout import Layout


@dataclasses.dataclass(frozen=True)
class Volume:
    """Bytes sent by one process in one optimizer step."""

    parameters: float = 0.0
    """All-gathers of weights."""
    gradients: float = 0.0
    """Reduce-scatters or all-reduces of gradients within a sharding group."""
    between: float = 0.0
    """All-reduces of gradient shards between replicas (HSDP)."""
    axes: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Bytes along each axis that divides the model."""

    @property
    def inside(self) -> float:
        return self.parameters + self.gradients

    @property
    def total(self) -> float:
        return self.inside + self.between + sum(self.axes.values())


def ring(processes: int) -> float:
    """Fraction of a tensor that each process sends in an all-gather or reduce-scatter."""
    return (processes - 1) / processes


def volume(
    layout: Layout,
    weight_bytes: float,
    trained_weight_bytes: float,
    gradient_bytes: float,
    accumulation: int = 1,
    synchronise_each: bool = False,
    kept_bytes: float = 0.0,
) -> Volume:
    """Bytes sent per process and optimizer step.

    Args:
        weight_bytes: all gathered weights, including frozen ones.
        trained_weight_bytes: gathered trained weights, which ZeRO-1 and 2 gather after a step.
        gradient_bytes: gradients of trained weights, in the data type of the reduction.
        synchronise_each: FSDP reduces after every micro-batch and keeps no unsharded gradients.
        kept_bytes: weights that FSDP keeps gathered from the forward to the backward pass.
    """
    share, steps, traits = ring(layout.group), accumulation, layout.traits
    if traits.alone or layout.processes == 1:
        return Volume()
    if not traits.shards:
        return Volume(gradients=2 * gradient_bytes * share)
    if not traits.shards_all:
        # Stage 1 reduces once; 2 and 3 keep only their shard and reduce after every micro-batch.
        reduced = gradient_bytes * (1 if layout.shard == "optimizer" else steps)
        gathered = 2 * steps * weight_bytes if layout.shard == "params" else trained_weight_bytes
        return Volume(gathered * share, reduced * share)
    again = weight_bytes - kept_bytes if layout.shard == "params" else 0.0
    reduces = steps if synchronise_each else 1
    between = 2 * gradient_bytes / layout.group * ring(layout.replicas)  # once a step
    return Volume(steps * (weight_bytes + again) * share, reduces * gradient_bytes * share, between)
