"""Compare a profiled step across ranks: seconds of compute, communication and waiting."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from finetune.distributed.pipeline import PASS
from finetune.planner.mesh import Mesh

Interval = tuple[float, float]
"""Start and end, in microseconds."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Seconds of one rank in a step."""

    step: float
    computes: float
    """In its own operations."""
    exchanges: float
    """During a collective or a point-to-point transfer, including overlap with compute."""
    passes: float = 0.0
    """In passes of micro-batches through its pipeline stages; 0 without a pipeline."""
    pipeline: float = 0.0
    """From the start of its first pass to the end of its last pass."""

    @property
    def waits(self) -> float:
        """Seconds without compute: Python, and waiting for other ranks."""
        return max(0.0, self.step - self.computes)


def shares(
    events: Iterable[FunctionEvent], step: float, computes: float, exchanged: Sequence[Interval],
    cuda: bool,
) -> Shares:  # fmt: skip
    """The shares of this rank.

    Args:
        step: seconds of the step.
        computes: seconds in this rank's own operations.
        exchanged: intervals of collectives.
        cuda: whether to read passes from the device's copy of the annotations.
    """
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    passes = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name.startswith(PASS) and event.device_type == device
    ]
    span = max(end for _, end in passes) - min(start for start, _ in passes) if passes else 0.0
    return Shares(step, computes, union(exchanged) / 1e6, union(passes) / 1e6, span / 1e6)


def union(intervals: Iterable[Interval]) -> float:
    """Length of the union of the intervals, in microseconds."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def bubble(found: Sequence[Shares]) -> float:
    """Share of the pipeline's time in which a stage runs no pass, averaged over all ranks.

    The first stage starts first and ends last, so its span is the pipeline's.
    """
    span = max(each.pipeline for each in found)
    return 1 - sum(each.passes for each in found) / (span * len(found))


def table(found: Sequence[Shares], mesh: Mesh, expected: float) -> list[str]:
    """Lines with the shares of each rank, the slowest rank, and the pipeline's bubble.

    Args:
        found: shares in the order of ranks.
        expected: the bubble by the formula.
    """
    places = [mesh.where(rank) for rank in range(len(found))]
    wide = max(len("place"), *map(len, places))
    lines = [f"  {'rank':>4}  {'place':{wide}}  computes  exchanges     waits"]
    for rank, each in enumerate(found):
        parts = [f"{seconds:7.3f} s" for seconds in (each.computes, each.exchanges, each.waits)]
        lines.append(f"  {rank:4}  {places[rank]:{wide}}  {'  '.join(parts)}")
    slowest = max(range(len(found)), key=lambda rank: found[rank].computes)
    least = min(each.computes for each in found)
    lines.append(
        f"slowest: rank {slowest} ({places[slowest]}) computes {found[slowest].computes:.3f} s, "
        f"the fastest {least:.3f} s"
    )
    if mesh.pipeline > 1:
        lines.append(
            f"pipeline: a stage runs no pass in {bubble(found):.1%} of the time, "
            f"by the formula {expected:.1%}"
        )
    return lines
