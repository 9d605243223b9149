"""Collect differences between a plan and what Accelerate built."""

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DIVIDED = "_divided_over_a_mesh"
"""Attribute that marks a model which an engine divided over a mesh without a wrapper."""

Compare = Callable[[str, object, object], None]
"""Records a difference, if any: the name, the value in the plan, the value that was built."""


def comparing(differences: list[str]) -> Compare:
    """A function that appends each difference between the plan and what was built to a list."""

    def compare(what: str, asked: object, built: object) -> None:
        if asked != built:
            differences.append(f"{what}: the plan has {asked}, Accelerate built {built}")

    return compare


def wrapped_by(model: nn.Module) -> str:
    """Name of the engine that wrapped a model."""
    if DIVIDED in vars(model):
        return "mesh"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FSDPModule):
        return "fsdp"
    return "deepspeed" if type(model).__name__ == "DeepSpeedEngine" else "single"
