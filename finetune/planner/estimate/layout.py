"""The layout of training over processes: engine, sharding, offload."""

import dataclasses
from typing import Literal

from finetune.backend import Backend, Engine, Offload, Shard
from finetune.backend.axes import KEYS, UNDIVIDED, Axes
from finetune.errors import FinetuneError
from finetune.planner.engines import TRAITS, Traits
from finetune.planner.mesh import mesh_of

Device = Literal["none", "cpu", "nvme"]

NAMES: dict[tuple[Engine, Shard], str] = {
    ("single", "none"): "single",
    ("ddp", "none"): "ddp",
    ("deepspeed", "optimizer"): "zero1",
    ("deepspeed", "grads"): "zero2",
    ("deepspeed", "params"): "zero3",
    ("fsdp", "grads"): "fsdp_shard_grad_op",
    ("fsdp", "params"): "fsdp_full_shard",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Training over processes: who holds what."""

    engine: Engine = "single"
    shard: Shard = "none"
    processes: int = 1
    replicas: int = 1
    """Groups that each hold a whole sharded copy (HSDP); 1 for one group of all processes."""
    offload: Offload = "none"
    device: Device = "none"
    """Where offloaded state lives."""
    axes: Axes = UNDIVIDED
    """How the model is divided over processes that train on the same rows."""
    stage: int = 0
    """Place on the pipeline of the process that is meant."""

    def __post_init__(self) -> None:
        if self.processes % self.replicas:
            raise FinetuneError(
                f"layout: {self.processes} processes do not divide into {self.replicas} replicas"
            )

    @property
    def traits(self) -> Traits:
        """What the engine is like; a mesh shards by FSDP2 or holds what one process does."""
        if self.axes.any:
            return TRAITS["fsdp" if self.shard != "none" else "single"]
        return TRAITS[self.engine]

    @property
    def for_own_module(self) -> bool:
        """Whether a weight is whole while its own module runs, and only then (ZeRO-3)."""
        return self.shard == "params" and self.traits.for_own_module

    @property
    def group(self) -> int:
        """Processes over which state is sharded: those that share a row's tokens are among them."""
        return self.processes // self.replicas // (self.axes.pipeline * self.axes.tensor)

    @property
    def data(self) -> int:
        """Groups of processes that read rows of their own."""
        return max(1, self.processes // self.axes.processes)

    @property
    def name(self) -> str:
        """Name of the backend, as in `accelerate_configs`; HSDP has a name of its own."""
        if self.axes.any:
            keys = sorted(KEYS, key=lambda key: key == "tp")  # experts before what divides layers
            named = [key for key in keys if getattr(self.axes, KEYS[key]) > 1]
            return "_".join([*named, "fsdp"] if self.data > 1 else named)
        name = NAMES[self.engine, self.shard]
        if self.replicas > 1:
            name = "hsdp" if self.shard == "params" else "hsdp_shard_grad_op"
        if self.offload == "none":
            return name
        if self.device == "nvme":
            return f"{name}_nvme"
        partial = self.traits.masters and self.shard == "params"
        optimizer_only = partial and self.offload == "optimizer"
        return f"{name}_offload_optimizer" if optimizer_only else f"{name}_offload"

    def share(self, what: Shard) -> int:
        """Processes over which `what` is divided: 1 where each process holds all of it.

        FSDP2's shards of parameters stay shards; what SHARD_GRAD_OP keeps gathered are copies.
        """
        if self.traits.shards_all and self.shard != "none":
            return self.group
        order = ("optimizer", "grads", "params")
        sharded = self.shard != "none" and order.index(self.shard) >= order.index(what)
        return self.group if sharded else 1


def of_backend(backend: Backend, processes: int) -> Layout:
    axes = backend.axes
    if axes.any:
        mesh = mesh_of(backend, processes)
        sharded = mesh.data * mesh.sequence > 1
        shard: Shard = "params" if sharded else "none"
        return Layout(backend.engine, shard, processes, mesh.replicate, axes=axes)
    replicas = 1 if backend.shard_size is None else processes // backend.shard_size
    return Layout(
        backend.engine, backend.shard, processes, replicas, backend.offload, backend.device
    )
