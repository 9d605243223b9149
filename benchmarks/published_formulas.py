"""Formulas of papers and other tools, for plan cases; the planner does not use them."""

import dataclasses
import math
from typing import Literal

from finetune.planner.estimate import communication
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.workload import nf4_bits

Recompute = Literal["none", "tp", "tp_sp", "tp_selective", "tp_sp_selective", "full_recompute"]

# torch 2.13 DistributedDataParallel: bucket_cap_mb, and the smaller first bucket.
DDP_BUCKET = 25 * 2**20
DDP_FIRST_BUCKET = 2**20


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


# ZeRO paper, section 3.1: fp16 weights and gradients, fp32 master weights and two fp32 moments.
MIXED = PerParameter(2, 2, 12)
FULL = PerParameter(4, 4, 8)
PURE_BF16 = PerParameter(2, 2, 4)


def attention_term(heads: int, length: int, hidden: int) -> float:
    """5 a s / h of arXiv:2205.05198: the cost of attention scores; the rest of a layer costs 34."""
    return 5 * heads * length / hidden


@dataclasses.dataclass(frozen=True)
class Estimate:
    """DeepSpeed's estimate of model states, in bytes per GPU and per host."""

    gpu: float
    host: float


# Memory in addition to weights for one short row: a context (0.6 GB), the logits of 1,000 to 2,000
# tokens and their gradients (12 bytes x 32,000 each: 0.8 GB), adapters and their optimizer state.
REST = 2e9
# Share of weights in the embedding or the head, which stay in 16 bits when the layers are
# quantized: 5 % in an 8B model.
UNQUANTISED = 0.05


def tensor_parallel(
    layers: int, hidden: int, tokens: int, ways: int, recompute: bool, element: int = 2
) -> float:
    """Bytes sent per process and micro-batch by tensor parallel layers (arXiv:1909.08053).

    Each layer all-reduces its output of tokens x hidden twice forwards and twice backwards; full
    recomputation repeats the two of the forward pass.
    """
    reduces = 6 if recompute else 4
    return layers * reduces * 2 * communication.ring(ways) * tokens * hidden * element


def no_sync_saving(accumulation: int) -> float:
    """Share of gradient traffic saved by reducing once per step instead of per micro-batch."""
    return 1 - 1 / accumulation


def selective_saving(heads: int, length: int, hidden: int) -> float:
    """Share of activation memory saved by recomputing only attention (arXiv:2205.05198)."""
    term = attention_term(heads, length, hidden)
    return term / (34 + term)


def megatron_activations(
    length: int, rows: int, hidden: int, heads: int, ways: int, variant: Recompute
) -> float:
    """Activation bytes of a GPT layer in Megatron (arXiv:2205.05198, Table 2).

    For a GPT-2 block in 16 bits with dropout; a Llama block of transformers keeps other tensors.
    """
    unit = length * rows * hidden
    term = attention_term(heads, length, hidden)
    factors: dict[Recompute, float] = {
        "none": 34 + term,
        "tp": 10 + 24 / ways + term / ways,
        "tp_sp": 34 / ways + term / ways,
        "tp_selective": 10 + 24 / ways,
        "tp_sp_selective": 34 / ways,
        "full_recompute": 2,
    }
    return unit * factors[variant]


def megatron_flops(batch: int, length: int, layers: int, hidden: int, vocab: int) -> float:
    """FLOPs of an iteration without recomputation (arXiv:2205.05198, appendix A)."""
    inner = 1 + length / (6 * hidden) + vocab / (12 * hidden * layers)
    return 72 * batch * layers * length * hidden**2 * inner


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
    """`estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19, term by term.

    `largest` is the largest number of parameters that a module itself holds.
    """
    gpus = gpus_per_node * nodes
    live = 4 * largest
    if not offload_optimizer:
        host = (4 * largest if zero_init else 4 * parameters) * gpus_per_node
        return Estimate(live + int(18 * parameters / gpus), host * factor)
    held = (18 if offload_parameters else 16) / nodes
    loading = held if zero_init else max(4 * gpus_per_node, held)
    gpu = live if offload_parameters else live + int(2 * parameters / gpus)
    return Estimate(gpu, parameters * loading * factor)


def rules_of_thumb(parameters: float) -> dict[str, float]:
    """Rough memory in bytes by method, as in published tables, without batch and vocabulary size.

    LLaMA-Factory's README and Unsloth's requirements page have such numbers.
    """
    nf4 = nf4_bits() / 8 * (1 - UNQUANTISED) + 2 * UNQUANTISED
    each = {
        "full_bf16_amp": MIXED.total + 2,  # fp32 gradients are copied for reduction
        "full_pure_bf16": PURE_BF16.total,
        "lora16": 2.0,
        "qlora8": 1.0 * (1 - UNQUANTISED) + 2 * UNQUANTISED,
        "qlora4": nf4,
        "qlora2": 0.25 * (1 - UNQUANTISED) + 2 * UNQUANTISED,
    }
    return {name: width * parameters + REST for name, width in each.items()}


def bubble(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Fraction of a step in which a pipeline stage is idle (arXiv:2104.04473, section 2.2).

    (p - 1) / (v m + p - 1) for p stages, v model chunks per stage and m micro-batches.
    """
    return (stages - 1) / (virtual * microbatches + stages - 1)


def offload_break_even(flops: float, mfu: float, bandwidth: float) -> float:
    """Tokens per micro-step above which the transfer of offloaded weights is not the bottleneck.

    4 bytes per weight are transferred, 2 in each pass, during 8 FLOPs per weight and token
    (including recomputation): 8 T / (F m) = 4 / B, therefore T* = F m / (2 B).
    """
    return flops * mfu / (2 * bandwidth)


def scaled_lr(base: float, processes: int, rule: str) -> float:
    """The learning rate under a scaling rule of a recipe's `lr_scaling`."""
    return base * {"none": 1.0, "linear": float(processes), "sqrt": math.sqrt(processes)}[rule]


def lr_warning(processes: int, rule: str) -> str:
    """Advice about a scaled learning rate; empty if it is not scaled."""
    return "warmup; sqrt rule for Adam" if rule == "linear" and processes > 1 else ""
