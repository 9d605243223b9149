"""The part of a parameter and its optimizer state that one process writes into a checkpoint."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from finetune.distributed.boxes import Box, boxes_of


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A part of a parameter with its optimizer state: a range of flattened elements, or a block.

    `values["weight"]` is the fp32 weight; the others are optimizer state under the optimizer's own
    names. Each has the flat elements [start, start + numel), or the shape of the block. `whole` has
    state of other sizes and `scalars` plain numbers. State of each row, such as the scales of
    narrow moments, is a fragment of its own, with its `shape`.
    """

    name: str
    start: int
    values: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    offsets: tuple[int, ...] | None = None
    """Offsets of a block in each dimension; None for a range."""
    shape: tuple[int, ...] | None = None
    """Unsharded shape of the values, if it is not the parameter's."""

    def boxes(
        self, shape: tuple[int, ...], values: torch.Tensor
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes that `values` fill in a parameter of `shape`, with the values of each."""
        if self.offsets is not None:
            yield Box(self.offsets, tuple(values.shape)), values
            return
        reached = 0
        for box in boxes_of(shape, self.start, values.numel()):
            yield box, values[reached : reached + box.numel].reshape(box.sizes)
            reached += box.numel


def scalar_state(scalars: dict[str, float], device: torch.device) -> dict[str, Any]:
    """Scalars of a checkpoint as optimizers have them.

    Counters are fp32 tensors in torch (on the device if fused), ints in bitsandbytes.
    """
    return {
        key: torch.tensor(number, device=device) if isinstance(number, float) else number
        for key, number in scalars.items()
    }
