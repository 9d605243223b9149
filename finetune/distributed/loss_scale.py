"""Loss scaling for fp16, in which most gradients would underflow.

The scale is a power of two, which causes no rounding. If a gradient overflows, nothing is updated
and the loop repeats the step with a lower scale, so no rows are skipped.
"""

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator

FIRST, LEAST = 2.0**16, 1.0
FALL = 4.0
"""Divisor of the scale after an overflow."""
PATIENCE = 1000
"""Steps without an overflow after which the scale doubles, up to `FIRST`."""


class LossScale:
    """The factor of a job's losses, equal on every rank."""

    def __init__(self, used: bool) -> None:
        """`used` is false for types with the exponent range of fp32: the factor stays 1."""
        self.used = used
        self.value = FIRST if used else 1.0
        self._clean = 0

    def undo(self, gradients: list[torch.Tensor]) -> None:
        """Divide the gradients of a scaled loss by the factor, in place."""
        for gradient in gradients:
            gradient.div_(self.value)

    def taken(self) -> None:
        """Record a step without an overflow."""
        self._clean += 1
        if self.used and self._clean >= PATIENCE and self.value < FIRST:
            self.value, self._clean = 2 * self.value, 0

    def state(self) -> dict[str, float] | None:
        """State for a checkpoint; None if the factor stays 1."""
        return {"value": self.value, "clean": self._clean} if self.used else None

    def restore(self, state: dict[str, float] | None) -> None:
        """Restore the state of a checkpoint, which is None if it was saved in another precision."""
        if self.used and state is not None:
            self.value, self._clean = state["value"], int(state["clean"])

    def lower(self) -> bool:
        """Lower the factor after a gradient that is not finite; returns whether it was lowered."""
        self._clean = 0
        if not self.used or self.value <= LEAST:
            return False
        self.value = max(LEAST, self.value / FALL)
        return True


def announce_fp16(accelerator: Accelerator) -> None:
    """Set Accelerate's precision to fp16, also on CPUs, without its gradient scaler.

    Accelerate 1.15 accepts fp16 only on accelerators, and uses torch's scaler, which skips the rows
    of a step that overflows.
    """
    accelerator.state._mixed_precision = "fp16"


@contextlib.contextmanager
def autocasting(accelerator: Accelerator, fp16: bool) -> Iterator[None]:
    """Context in which Accelerate prepares models to run under autocast in fp16.

    The setting is undone afterwards, because Accelerate would use its scaler when clipping.
    """
    if not fp16:
        yield
        return
    accelerator.native_amp = True
    yield
    accelerator.native_amp = False
