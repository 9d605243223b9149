"""Bytes per parameter that stay from step to step, and who holds how many of them."""

import dataclasses

from finetune.planner.estimate.layout import Layout

GB = 10**9
GIB = 2**30

# NF4 (arXiv:2305.14314): 4 bits a weight and one fp32 maximum per block of 64. Double quantisation
# stores the maxima in 8 bits, with one fp32 maximum per 256 of them: 4 + 8/64 + 32/(64 x 256) bits.
NF4_BLOCK = 64
NF4_SECOND_BLOCK = 256
# bitsandbytes 8-bit optimizers (arXiv:2110.02861): one byte an element and one fp32 maximum per
# 256 elements, two moments; tensors under 4096 elements keep fp32 moments (min_8bit_size).
ADAM8_BLOCK = 256
ADAM8_SMALLEST = 4096


def nf4_bits(double_quantised: bool = True, block: int = NF4_BLOCK) -> float:
    """Bits per weight in NF4, its scales included."""
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
    """Moments, and fp32 master weights where the engine keeps them."""

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
        """How many times smaller than unsharded: approaches 4 (ZeRO-1) and 8 (ZeRO-2), never N."""
        return self.total / self.held(layout)


def adam_moments(width: float, eight_bit: bool) -> float:
    """Bytes per parameter of AdamW's two moments, kept in `width` bytes or in 8 bits."""
    return 2 * (1 + 4 / ADAM8_BLOCK) if eight_bit else 2 * width


# ZeRO paper, section 3.1: fp16 weights and gradients, fp32 master weights and two fp32 moments.
MIXED = PerParameter(2, 2, 12)
FULL = PerParameter(4, 4, 8)
PURE_BF16 = PerParameter(2, 2, 4)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """DeepSpeed's own estimate of model states: bytes of one GPU, and of one host."""

    gpu: float
    host: float


def deepspeed_zero2(
    parameters: float, gpus_per_node: int, nodes: int, offload: bool, factor: float = 1.5
) -> Estimate:
    """`estimate_zero2_model_states_mem_needs` of DeepSpeed 0.19, term by term."""
    gpus = gpus_per_node * nodes
    if offload:
        host = parameters * max(4 * gpus, 16) * factor
        return Estimate(2 * parameters, host)
    host = parameters * 4 * gpus_per_node * factor
    return Estimate(2 * parameters + int(18 * parameters / gpus), host)


def deepspeed_zero3(
    parameters: float,
    largest: float,
    gpus_per_node: int,
    nodes: int,
    offload_optimizer: bool,
    offload_parameters: bool,
    zero_init: bool = True,
    factor: float = 1.5,
) -> Estimate:
    """`estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19; `largest`: a module's own size."""
    gpus = gpus_per_node * nodes
    live = 4 * largest
    if not offload_optimizer:
        host = (4 * largest if zero_init else 4 * parameters) * gpus_per_node
        return Estimate(live + int(18 * parameters / gpus), host * factor)
    held = (18 if offload_parameters else 16) / nodes
    loading = held if zero_init else max(4 * gpus_per_node, held)
    gpu = live if offload_parameters else live + int(2 * parameters / gpus)
    return Estimate(gpu, parameters * loading * factor)


# What is left beside weights for one short row: a context (0.6 GB), the logits of a thousand or two
# tokens and their gradients (12 bytes x 32,000 each: 0.8 GB), adapters and their optimizer state.
REST = 2e9
# Embedding and head stay in 16 bits when the layers are quantised: 5 % of an 8B model's weights
# are one of the two.
UNQUANTISED = 0.05


def rules_of_thumb(parameters: float) -> dict[str, float]:
    """Bytes for a first look, by method, as published tables give them: no batch, no vocabulary.

    LLaMA-Factory's README and Unsloth's requirements page print such numbers; the planner itself
    never uses them.
    """
    nf4 = nf4_bits() / 8 * (1 - UNQUANTISED) + 2 * UNQUANTISED
    each = {
        "full_bf16_amp": MIXED.total + 2,  # and fp32 gradients are copied for reduction
        "full_pure_bf16": PURE_BF16.total,
        "lora16": 2.0,
        "qlora8": 1.0 * (1 - UNQUANTISED) + 2 * UNQUANTISED,
        "qlora4": nf4,
        "qlora2": 0.25 * (1 - UNQUANTISED) + 2 * UNQUANTISED,
    }
    return {name: width * parameters + REST for name, width in each.items()}
