"""A profiled step on all ranks side by side: who computes, who exchanges, and who waits."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from finetune.distributed.pipeline import PASS
from finetune.planner.mesh import AXES, Mesh

Interval = tuple[float, float]
"""Start and end, in microseconds."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Seconds of one rank in a step."""

    step: float
    computes: float
    """In operations of its own."""
    exchanges: float
    """In which a collective or a hand-over is under way, also while it computes."""
    passes: float = 0.0
    """In passes of micro-batches through its stages; 0 without a pipeline."""
    pipeline: float = 0.0
    """From the start of its first pass to the end of its last."""

    @property
    def waits(self) -> float:
        """Seconds in which it computes nothing: Python, and waiting for others."""
        return max(0.0, self.step - self.computes)


def shares(
    events: Iterable[FunctionEvent], step: float, computes: float, exchanged: Sequence[Interval],
    cuda: bool,
) -> Shares:  # fmt: skip
    """The shares of this rank.

    Args:
        step: seconds.
        computes: seconds.
        exchanged: when collectives were under way.
        cuda: whether passes are those of the device, as which torch's annotations return.
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
    """How long at least one of them lasts."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def bubble(found: Sequence[Shares]) -> float:
    """Share of a pipeline's time in which a stage runs no pass, over all ranks.

    The first stage starts first and ends last: its span is the pipeline's.
    """
    span = max(each.pipeline for each in found)
    return 1 - sum(each.passes for each in found) / (span * len(found))


def table(found: Sequence[Shares], mesh: Mesh, expected: float) -> list[str]:
    """A line for each rank, the slowest one, and the pipeline's bubble.

    Args:
        found: of every rank, by rank.
        expected: the bubble of the formula.
    """
    places = [_place(mesh, rank) for rank in range(len(found))]
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


def _place(mesh: Mesh, rank: int) -> str:
    """Such as `pipeline 1, tensor 0`."""
    place = mesh.place(rank)
    return ", ".join(f"{axis} {place[axis]}" for axis in AXES if getattr(mesh, axis) > 1)
