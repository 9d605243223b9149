"""Scale the loss of fp16, whose smallest numbers are too large for most gradients.

The scale is a power of two, so that nothing is rounded by it. Where a gradient overflows, nothing
is updated, and the loop takes the same step again with a lower one: no row is left out.
"""

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator

FIRST, LEAST = 2.0**16, 1.0
FALL = 4.0
"""By which it falls after an overflow."""
PATIENCE = 1000
"""Steps without an overflow after which it doubles, up to the first."""


class LossScale:
    """The factor of the losses of one job, the same on every rank."""

    def __init__(self, used: bool) -> None:
        """`used` is false for types with the exponents of fp32: the factor stays 1."""
        self.used = used
        self.value = FIRST if used else 1.0
        self._clean = 0

    def undo(self, gradients: list[torch.Tensor]) -> None:
        """Divide the gradients of a scaled loss by the factor, in place."""
        for gradient in gradients:
            gradient.div_(self.value)

    def taken(self) -> None:
        """A step without an overflow."""
        self._clean += 1
        if self.used and self._clean >= PATIENCE and self.value < FIRST:
            self.value, self._clean = 2 * self.value, 0

    def state(self) -> dict[str, float] | None:
        """What a checkpoint keeps of it; None where the factor stays 1."""
        return {"value": self.value, "clean": self._clean} if self.used else None

    def restore(self, state: dict[str, float] | None) -> None:
        """Go on from what a checkpoint kept; one of another precision kept nothing."""
        if self.used and state is not None:
            self.value, self._clean = state["value"], int(state["clean"])

    def lower(self) -> bool:
        """After a gradient that is not finite: whether a lower factor may make it so."""
        self._clean = 0
        if not self.used or self.value <= LEAST:
            return False
        self.value = max(LEAST, self.value / FALL)
        return True


def announce_fp16(accelerator: Accelerator) -> None:
    """Let Accelerate know the precision, on a CPU too and without a scaler of its own.

    Accelerate 1.15 takes fp16 on accelerators alone, and multiplies the loss by torch's scaler,
    whose step leaves out the rows of an overflow.
    """
    accelerator.state._mixed_precision = "fp16"


@contextlib.contextmanager
def autocasting(accelerator: Accelerator, fp16: bool) -> Iterator[None]:
    """Inside, Accelerate prepares models to run under autocast in its precision.

    With fp16 it would look for its scaler afterwards, whenever gradients are clipped.
    """
    if not fp16:
        yield
        return
    accelerator.native_amp = True
    yield
    accelerator.native_amp = False
