"""Layout of training over processes: engine, sharding and offload."""

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
    """Distribution of the training state over processes."""

    engine: Engine = "single"
    shard: Shard = "none"
    processes: int = 1
    replicas: int = 1
    """Number of groups that each shard one complete copy (HSDP); 1 for a single group."""
    offload: Offload = "none"
    device: Device = "none"
    """Device for offloaded state."""
    axes: Axes = UNDIVIDED
    """Division of the model over processes that train on the same rows."""
    stage: int = 0
    """Pipeline stage of the process to predict."""

    def __post_init__(self) -> None:
        if self.processes % self.replicas:
            raise FinetuneError(
                f"layout: {self.processes} processes do not divide into {self.replicas} replicas"
            )

    @property
    def traits(self) -> Traits:
        """Properties of the engine; for a mesh, those of FSDP2, or of one process if unsharded."""
        if self.axes.any:
            return TRAITS["fsdp" if self.shard != "none" else "single"]
        return TRAITS[self.engine]

    @property
    def for_own_module(self) -> bool:
        """Whether a weight is gathered only while its own module runs (ZeRO-3)."""
        return self.shard == "params" and self.traits.for_own_module

    @property
    def group(self) -> int:
        """Processes over which state is sharded, including those that split the tokens of a row."""
        return self.processes // self.replicas // (self.axes.pipeline * self.axes.tensor)

    @property
    def expert_shards(self) -> int:
        """Processes that hold the same experts, over which FSDP2 shards them."""
        return self.group * self.axes.tensor // self.axes.experts

    @property
    def data(self) -> int:
        """Number of process groups that read different rows."""
        return max(1, self.processes // self.axes.processes)

    @property
    def name(self) -> str:
        """Name of the backend, as in `accelerate_configs`; `hsdp...` for several replicas."""
        if self.axes.any:
            keys = sorted(KEYS, key=lambda key: key == "tp")  # ep before tp
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
        """Number of processes over which `what` is sharded; 1 if each process holds all of it.

        FSDP2 always shards parameters; those that SHARD_GRAD_OP keeps gathered are copies.
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
