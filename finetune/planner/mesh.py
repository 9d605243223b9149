"""The mesh of a job: its processes along named axes."""

import dataclasses
import math

from finetune.backend import Backend

AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Axes in the order of the ranks: neighbours lie along the last one."""
DATA = ("replicate", "shard")
"""Axes whose processes read rows of their own."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Processes along each axis; their product is the number of processes.

    The data axes read rows of their own. The others divide a model: all processes of one place on
    the data axes train on the same rows together.
    """

    pipeline: int = 1
    """Stages of the layers."""
    replicate: int = 1
    """Copies of the model, each trained on rows of its own."""
    shard: int = 1
    """Processes that hold one copy together."""
    sequence: int = 1
    """Processes that share the tokens of a row."""
    tensor: int = 1
    """Processes that share each layer."""
    experts: int = 1
    """Processes along `shard` and `tensor` over which the experts of a layer lie."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of `AXES`, in their order."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def processes(self) -> int:
        return math.prod(self.sizes)

    @property
    def expert_copies(self) -> int:
        """Processes that hold the same experts together."""
        return self.shard * self.tensor // self.experts

    @property
    def data(self) -> int:
        """Groups of processes that read rows of their own."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which share of the rows a process reads."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a process, by axis."""
        found: dict[str, int] = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, found[axis] = divmod(rank, size)
        return found

    def summary(self) -> dict[str, int]:
        """Processes along the data axes, and along the others where there are several."""
        sizes = (*zip(AXES, self.sizes, strict=True), ("experts", self.experts))
        return {axis: size for axis, size in sizes if axis in DATA or size > 1}

    def words(self) -> str:
        """Such as `replicate 2 x shard 4`; axes of one process are left out."""
        named = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        experts = f" (experts over {self.experts})" if self.experts > 1 else ""
        return (" x ".join(named) or "one process") + experts

    __str__ = words


def mesh_of(backend: Backend, processes: int) -> Mesh:
    """The mesh of a backend: copies under DDP, shards under FSDP and ZeRO, both under HSDP.

    What divides the model comes first; what is left of the processes reads rows of its own.
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
