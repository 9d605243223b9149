"""Bytes per parameter that persist between steps, unsharded and per process."""

import dataclasses

from finetune.planner.estimate.layout import Layout

# NF4 (arXiv:2305.14314): 4 bits per weight, one fp32 maximum per block of 64. Double quantization
# stores the maxima in 8 bits, with one fp32 maximum per 256 of them: 4 + 8/64 + 32/(64 x 256) bits.
NF4_BLOCK = 64
NF4_SECOND_BLOCK = 256
# bitsandbytes 8-bit optimizers (arXiv:2110.02861): two moments, each with one byte per element and
# one fp32 maximum per 256 elements; smaller tensors than 4096 keep fp32 moments (min_8bit_size).
ADAM8_BLOCK = 256


def nf4_bits(double_quantised: bool = True, block: int = NF4_BLOCK) -> float:
    """Bits per weight in NF4, including scales."""
    if not double_quantised:
        return 4 + 32 / block
    return 4 + 8 / block + 32 / (block * NF4_SECOND_BLOCK)


def nf4_bytes(weights: float, double_quantised: bool = True) -> float:
    return weights * nf4_bits(double_quantised) / 8


@dataclasses.dataclass(frozen=True)
class PerParameter:
    """Bytes per trained parameter before sharding."""

    weights: float
    gradients: float
    optimizer: float
    """Moments, and fp32 master weights if the engine has them."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def held(self, layout: Layout) -> float:
        """Bytes per parameter on one process."""
        return (
            self.weights / layout.share("params")
            + self.gradients / layout.share("grads")
            + self.optimizer / layout.share("optimizer")
        )

    def saving(self, layout: Layout) -> float:
        """Reduction factor against no sharding: at most 4 (ZeRO-1) or 8 (ZeRO-2), not N."""
        return self.total / self.held(layout)


def adam_moments(width: float, eight_bit: bool) -> float:
    """Bytes per parameter of the two AdamW moments, stored in `width` bytes or in 8 bits."""
    return 2 * (1 + 4 / ADAM8_BLOCK) if eight_bit else 2 * width


# ZeRO paper, section 3.1: fp16 weights and gradients, fp32 master weights and two fp32 moments.
MIXED = PerParameter(2, 2, 12)
FULL = PerParameter(4, 4, 8)
PURE_BF16 = PerParameter(2, 2, 4)
