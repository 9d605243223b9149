"""The mesh of a job: its processes along named axes."""

import dataclasses
import math

AXES = ("replicate", "shard")
"""Axes in the order of the ranks: neighbours lie along the last one."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Processes along each axis; their product is the number of processes.

    Both axes read data: rank r of `replicate` x `shard` reads its own rows. An axis that divides a
    model and not the rows (tensor, pipeline, context) would not count in `data`.
    """

    replicate: int = 1
    """Copies of the model, each trained on rows of its own."""
    shard: int = 1
    """Processes that hold one copy together."""

    @property
    def processes(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Processes that read rows of their own."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which share of the rows a process reads."""
        return rank * self.data // self.processes

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a process."""
        return {"replicate": rank // self.shard, "shard": rank % self.shard}

    def words(self) -> str:
        """Such as `replicate 2 x shard 4`; axes of one process are left out."""
        named = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "one process"
