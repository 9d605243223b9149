"""Data types and kernels of a layer."""

import dataclasses
from typing import Literal

AttentionKind = Literal["flash", "masked", "eager"]
"""Attention implementations. `flash`: no mask; groups of heads share keys. `masked`: SDPA with a
materialized mask, keys and values repeated for all heads. `eager`: materialized scores and
probabilities."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Bytes per element of the tensors of a layer, and options that affect its memory."""

    residual: int = 2
    """Bytes per element of the hidden state between layers."""
    compute: int = 2
    """Bytes per element of the inputs and outputs of matrix products."""
    weights: int = 2
    """Bytes per element of the layer's stored weights."""
    autocast: bool = False
    """Each matrix product casts its inputs separately."""
    trained: bool = True
    """Whether the layer's own weights get gradients."""
    adapters: int = 2
    """Bytes per element of adapter weights."""
    expert_rank: int = 0
    """Rank of adapters on experts; their product is added to the complete weights first."""
    dropout: bool = False
    """Adapters apply dropout: each keeps its own mask and the masked input."""
    dora: bool = False
    """Adapters are DoRA of PEFT: a norm of each complete weight scales the results in fp32."""
    widened: bool = True
    """Under autocast, PEFT 0.21 first casts an adapter's input to the adapter's fp32. Its
    bitsandbytes layers leave casting to autocast on CUDA."""
    wide_masks: bool = False
    """Dropout masks have the data type of the input, as on a CPU, instead of one byte per
    element."""
    inputs_kept: bool = False
    """4-bit products keep their input even though no gradient needs it."""
    compiled: bool = False
    """Chains of pointwise operations are one kernel. It keeps its inputs and the values that the
    gradient of a weight multiplies: the partitioner of torch 2.13 does not recompute values that
    the backward pass must hold."""
    dequantised: bool = False
    """Weights are stored in 4 bits and dequantized for each product."""
    fused_norms: bool = False
    """RMSNorm is computed by `kernels.norm`."""
    fused_activations: bool = False
    """Gated activations are computed by `kernels.activation`."""
    fused_rotations: bool = False
    """Rotary embeddings are computed by `kernels.rotary`."""
    chained: bool = False
    """Each pointwise operation is one pass of compiled C without copies (`kernels.pointwise` on a
    CPU)."""
    grouped_adapters: bool = False
    """Adapted matrices are computed by `kernels.lora`."""
    rearranged: int = 0
    """Number of additional saved copies of attention's output in another order: concatenated
    documents that attended in separate calls, or heads exchanged for tokens. Ring attention makes
    none."""
    repeated: float = 1.0
    """Tokens in attention for each token elsewhere, if documents share prompts."""
    dispatched: bool = False
    """Whether tokens are sent to experts on other processes."""
    gathered: int = 1
    """Number of processes whose keys and values are gathered before attention (context
    parallel)."""
    ring: int = 1
    """Number of processes of ring attention, which pass keys and values around."""
