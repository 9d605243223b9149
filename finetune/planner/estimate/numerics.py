"""Data types and kernels that a layer computes with."""

import dataclasses
from typing import Literal

AttentionKind = Literal["flash", "masked", "eager"]
"""`flash`: no mask, keys shared by groups of heads. `masked`: SDPA with a mask in memory, keys and
values repeated to all heads. `eager`: scores and probabilities in memory."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Bytes per element of everything that a layer computes with."""

    residual: int = 2
    """The hidden state between layers."""
    compute: int = 2
    """Inputs and outputs of matrix products."""
    weights: int = 2
    """Weights as the layer holds them."""
    autocast: bool = False
    """Products cast their inputs, each on its own."""
    trained: bool = True
    """Whether the layer's own weights get gradients."""
    adapters: int = 2
    """Weights of adapters."""
    expert_rank: int = 0
    """Rank of adapters on experts: their product is added to the whole weights first."""
    dropout: bool = False
    """Adapters drop inputs: each keeps its own mask and what is left."""
    dora: bool = False
    """Adapters are PEFT's DoRA: a norm of each whole weight, and results scaled by it in fp32."""
    widened: bool = True
    """Under autocast PEFT casts an adapter's input to the adapter's fp32 first. Its layers over
    bitsandbytes leave that to CUDA's autocast (0.21)."""
    wide_masks: bool = False
    """Masks have the input's own type, as on a CPU; else a byte an element."""
    inputs_kept: bool = False
    """4-bit products keep their input although no gradient needs it."""
    compiled: bool = False
    """Chains of cheap operations are one kernel. It keeps what enters and what a weight's gradient
    multiplies: torch 2.13's partitioner recomputes nothing that the backward pass must hold."""
    dequantised: bool = False
    """Weights are stored in 4 bits and expanded for each product."""
    fused_norms: bool = False
    """RMSNorm as `kernels.norm` computes it."""
    fused_activations: bool = False
    """Gated units as `kernels.activation` computes them."""
    fused_rotations: bool = False
    """Rotary positions as `kernels.rotary` computes them."""
    chained: bool = False
    """Each cheap operation is one pass of compiled C, which copies nothing (`kernels.pointwise` on
    a CPU)."""
    grouped_adapters: bool = False
    """Adapted matrices as `kernels.lora` computes them."""
    rearranged: int = 0
    """Copies of attention's result in another order, each kept as well: documents that attended
    in calls of their own put side by side, heads exchanged for tokens."""
    dispatched: bool = False
    """Whether tokens travel to experts on other processes."""
    gathered: int = 1
    """Processes whose keys and values are gathered before attention (context parallel)."""
