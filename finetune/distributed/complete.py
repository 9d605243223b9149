"""Gather the values of a divided model into a complete one, for work that one process does alone.

Parts of a tensor are gathered from the processes that hold them; the tensors of a pipeline stage
are broadcast by the first stage that has them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of this process's pipeline."""

    group: torch.distributed.ProcessGroup
    """Processes of the pipeline, in the order of the stages."""
    mine: int
    """Stage of this process."""
    device: torch.device
    """Device of this process."""
    dtypes: list[dict[str, torch.dtype]]
    """Types of the tensors of each stage, by name."""

    def owner(self, name: str) -> int:
        """The first stage that has a tensor."""
        return next(stage for stage, there in enumerate(self.dtypes) if name in there)


@contextlib.contextmanager
def filled(
    blank: nn.Module, divided: nn.Module, stages: Stages | None, dtype: torch.dtype
) -> Iterator[None]:
    """Context in which a model on the meta device has all values of a divided model.

    Every process must enter it: gathering is collective. Values that are not divided are shared.

    Args:
        blank: Complete model with the names of the divided one, whose values are freed on exit.
        divided: Model whose parameters are resharded.
        stages: Stages of a pipeline; None without one.
        dtype: Type in which weights of linear layers are gathered, to which autocast casts them.
    """
    held = tensors(divided)
    places = _places(blank)
    try:
        for name, slots in places.items():
            narrow = dtype if all(slot.is_cast for slot in slots) else None
            value = _complete(name, held.get(name), slots[0].current(), stages, narrow)
            for slot in slots:
                put(slot.module, slot.leaf, value)
        yield
    finally:
        for slots in places.values():
            for slot in slots:
                put(slot.module, slot.leaf, torch.empty_like(slot.current(), device="meta"))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model by name; one that is tied has several names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Types of `tensors`."""
    return {name: each.dtype for name, each in tensors(model).items()}


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A parameter or buffer of one module."""

    module: nn.Module
    leaf: str

    @property
    def is_cast(self) -> bool:
        """Whether autocast casts the tensor: the weight of a linear layer."""
        return isinstance(self.module, nn.Linear) and self.leaf == "weight"

    def current(self) -> torch.Tensor:
        return getattr(self.module, self.leaf)


def put(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a tensor of a module by one that may have another device, dtype or shape."""
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[name] = value


def _places(blank: nn.Module) -> dict[str, list[_Slot]]:
    """The slots of each tensor, several if it is tied, by its first name."""
    named: dict[int, str] = {}
    found: dict[str, list[_Slot]] = {}
    for name, tensor in tensors(blank).items():
        path, _, leaf = name.rpartition(".")
        first = named.setdefault(id(tensor), name)
        found.setdefault(first, []).append(_Slot(blank.get_submodule(path), leaf))
    return found


def _complete(
    name: str,
    held: torch.Tensor | None,
    blank: torch.Tensor,
    stages: Stages | None,
    narrow: torch.dtype | None,
) -> torch.Tensor:
    """The complete values of a tensor, in its own type or in `narrow`.

    `held` is this process's part, None if it has none.
    """
    owner = 0 if stages is None else stages.owner(name)
    if stages is None or owner == stages.mine:
        assert held is not None, f"{name} is in no part of the model"
        value = held.detach() if narrow is None else held.detach().to(narrow)
        value = value.full_tensor() if isinstance(value, DTensor) else value
    else:
        dtype = narrow or stages.dtypes[owner][name]
        value = torch.empty(blank.shape, dtype=dtype, device=stages.device)
    if stages is not None:
        value = value.contiguous()
        torch.distributed.broadcast(value, group=stages.group, group_src=owner)
    return value
