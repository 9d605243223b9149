"""The device mesh of a job: processes along named axes."""

import dataclasses
import math

from finetune.backend import Backend

AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Axes in rank order: consecutive ranks differ in the last axis."""
DATA = ("replicate", "shard")
"""Axes whose processes read different rows."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Number of processes along each axis; the product is the total number of processes.

    Processes along the data axes read different rows. The other axes divide a model: all processes
    with the same coordinates on the data axes train on the same rows.
    """

    pipeline: int = 1
    """Number of pipeline stages."""
    replicate: int = 1
    """Copies of the model, each trained on different rows."""
    shard: int = 1
    """Processes over which one copy is sharded."""
    sequence: int = 1
    """Processes that split the tokens of a row."""
    tensor: int = 1
    """Processes that split each layer."""
    experts: int = 1
    """Processes, along `shard` and `tensor`, over which the experts of a layer are divided."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of `AXES`, in the same order."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def processes(self) -> int:
        return math.prod(self.sizes)

    @property
    def expert_copies(self) -> int:
        """Processes over which one group of experts is sharded."""
        return self.shard * self.tensor // self.experts

    @property
    def data(self) -> int:
        """Number of process groups that read different rows."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Index of the share of the rows that a process reads."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a process, by axis name."""
        found: dict[str, int] = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, found[axis] = divmod(rank, size)
        return found

    def where(self, rank: int) -> str:
        """Position of a process as text, such as `pipeline 1, tensor 0`; empty if it is alone."""
        place = self.place(rank)
        return ", ".join(f"{axis} {place[axis]}" for axis in AXES if getattr(self, axis) > 1)

    def summary(self) -> dict[str, int]:
        """Sizes of the data axes, and of the other axes that are larger than 1."""
        sizes = (*zip(AXES, self.sizes, strict=True), ("experts", self.experts))
        return {axis: size for axis, size in sizes if axis in DATA or size > 1}

    def words(self) -> str:
        """The mesh as text, such as `replicate 2 x shard 4`, without axes of size 1."""
        named = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        experts = f" (experts over {self.experts})" if self.experts > 1 else ""
        return (" x ".join(named) or "one process") + experts

    __str__ = words


def mesh_of(backend: Backend, processes: int) -> Mesh:
    """The mesh of a backend: copies under DDP, shards under FSDP and ZeRO, both under HSDP.

    The axes that divide the model are allocated first; the remaining factor of the processes is
    data parallel.
    """
    axes = backend.axes
    data = max(1, processes // axes.processes)
    shard = 1 if backend.shard == "none" else backend.shard_size or data
    return Mesh(
        pipeline=axes.pipeline,
        replicate=max(1, data // shard),
        shard=shard,
        sequence=axes.parts,
        tensor=axes.tensor,
        experts=axes.experts,
    )
