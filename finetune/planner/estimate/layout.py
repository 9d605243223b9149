"""How training is laid out over processes: engine, what is sharded, over how many, offload."""

import dataclasses
from typing import Literal

from finetune.backend import Backend, Engine, Offload, Shard
from finetune.errors import FinetuneError

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
    """Data parallel training: who holds what."""

    engine: Engine = "single"
    shard: Shard = "none"
    processes: int = 1
    replicas: int = 1
    """Groups that each hold a whole sharded copy (HSDP); 1 for one group of all processes."""
    offload: Offload = "none"
    device: Device = "none"
    """Where offloaded state lives."""

    def __post_init__(self) -> None:
        if self.processes % self.replicas:
            raise FinetuneError(
                f"layout: {self.processes} processes do not divide into {self.replicas} replicas"
            )

    @property
    def group(self) -> int:
        """Processes over which state is sharded."""
        return self.processes // self.replicas

    @property
    def name(self) -> str:
        """Name of the backend, as in `accelerate_configs`; HSDP has a name of its own."""
        name = NAMES[self.engine, self.shard]
        if self.replicas > 1:
            name = "hsdp" if self.shard == "params" else "hsdp_shard_grad_op"
        if self.offload == "none":
            return name
        if self.device == "nvme":
            return f"{name}_nvme"
        partial = self.engine == "deepspeed" and self.shard == "params"
        optimizer_only = partial and self.offload == "optimizer"
        return f"{name}_offload_optimizer" if optimizer_only else f"{name}_offload"

    def share(self, what: Shard) -> int:
        """Processes over which `what` is divided: 1 where each process holds all of it.

        FSDP2's shards of parameters stay shards; what SHARD_GRAD_OP keeps gathered are copies.
        """
        if self.engine == "fsdp" and self.shard != "none":
            return self.group
        order = ("optimizer", "grads", "params")
        sharded = self.shard != "none" and order.index(self.shard) >= order.index(what)
        return self.group if sharded else 1


def of_backend(backend: Backend, processes: int) -> Layout:
    return Layout(backend.engine, backend.shard, processes, 1, backend.offload, backend.device)
