"""Differences between what a plan asks for and what Accelerate built."""

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DIVIDED = "_divided_over_a_mesh"
"""Attribute of a model that an engine divided and wrapped in nothing."""

Compare = Callable[[str, object, object], None]
"""Notes a difference: what it is in, what the plan has, what was built."""


def comparing(differences: list[str]) -> Compare:
    """What notes each difference between what the plan has and what was built."""

    def compare(what: str, asked: object, built: object) -> None:
        if asked != built:
            differences.append(f"{what}: the plan has {asked}, Accelerate built {built}")

    return compare


def wrapped_by(model: nn.Module) -> str:
    """The engine that a model was wrapped by."""
    if DIVIDED in vars(model):
        return "mesh"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FSDPModule):
        return "fsdp"
    return "deepspeed" if type(model).__name__ == "DeepSpeedEngine" else "single"
