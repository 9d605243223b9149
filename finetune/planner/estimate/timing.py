"""Predict the time of a step with a roofline model: FLOPs on the GPU, bytes on the links."""

import dataclasses

from finetune.planner import schedules
from finetune.planner.estimate import stage_workload, traffic
from finetune.planner.estimate.autograd.operations import operations
from finetune.planner.estimate.communication import Volume
from finetune.planner.estimate.hardware import EFFICIENCY, Bound, Machine
from finetune.planner.estimate.sampling_cost import sampling
from finetune.planner.estimate.sharding import nvme
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture

# Fraction of communication that overlaps with computation: an assumption for NVLink (FSDP2
# prefetches one unit; DDP's buckets start with the first gradients), and half of it for slower
# links.
OVERLAP_FAST = 0.7
OVERLAP_SLOW = 0.35
# CPU AdamW reads and writes 28 bytes per parameter (weights, moments and gradient in fp32, the bf16
# copy); on two EPYC 7742 with bound cores that is 45 GB/s (deepspeedai/DeepSpeed, blogs/zenflow).
CPU_ADAM_BYTES = 28
HOST_BANDWIDTH = 45e9
# One NVMe drive of 2023 reads 3 to 6 GB/s.
NVME_BANDWIDTH = 4e9
# Pinned copies reach about this fraction of PCIe's peak rate (25 of 32 GB/s, 50 of 64).
PCIE_EFFICIENCY = 0.78
# Operations other than products, which PyTorch runs one by one: multiples of the bytes that they
# read and write in bf16 (in fp32 if all weights are trained). Fitted to three models on an H100
# with eager operations (docs/gpu.md); where they are compiled, they take `COMPILED` of that.
LAYERS_FULL, LAYERS_ADAPTER, LOSS = 2.5, 1.5, 5.0
COMPILED = 0.7
# Fused attention reaches this share of the rate of large products, and its backward pass computes
# the scores again: 2.5 times the work of its forward pass (arXiv:2307.08691).
ATTENTION, ATTENTION_BACKWARD = 0.55, 2.5
# Bytes that dequantization reads and writes per weight in 4 bits and pass.
DEQUANTIZED = 4.5
# Seconds of a collective of FSDP in addition to its bytes, and of the hooks with which ZeRO-3
# gathers and frees a module: fitted to runs of 256 to 4,096 tokens on 1, 4 and 8 GPUs.
GATHER, HOOKS = 150e-6, 400e-6


# Of 24 published runs for which no number here was chosen 21 took between 1 / 1.25 and 1.25 of the
# planned time; one with fused kernels for experts took 0.4 of what is planned for PyTorch's
# (benchmarks/results/rates.md).
SPREAD, SPREAD_EXPERTS = 1.25, 2.5


def uncertainty(workload: Workload) -> float:
    """Factor by which a planned time may be too short or too long."""
    return SPREAD if workload.shape.experts is None else SPREAD_EXPERTS


def flops_per_token(
    shape: Architecture, length: float, causal: bool = True, adapter: bool = False,
    recompute: bool = False,
) -> float:  # fmt: skip
    """FLOPs of training per token: 2 per weight and pass, plus the scores of attention.

    There are three passes (forward, gradient of inputs, gradient of weights); the last is absent
    for frozen weights, and recomputation repeats the first. The products inside attention have no
    weights: one forward and two backward passes in either case.
    """
    weights = 2.0 * shape.multiplied
    scores = 4.0 * shape.layers * shape.query * length * (0.5 if causal else 1.0)
    passes = 2 if adapter else 3
    extra = 1 if recompute else 0
    return (passes + extra) * weights + (3 + extra) * scores


def passes(workload: Workload) -> float:
    """Computation of a step including gradients, in forward passes.

    Weights that are frozen have no gradient, and layers before the first trained one no pass back.
    """
    share, layers = workload.share, workload.shape.layers
    again = 0.5 if workload.checkpointing == "selective" else float(workload.recomputes)
    if workload.adapter is not None:
        return 2.0 + again
    if share is None:
        return 3.0 + again
    back = (1 - share.skipped / layers) * (1 + workload.recomputes)
    return 1.0 + back + sum(share.layers) / layers


def step_flops(
    shape: Architecture, tokens: int, trained_tokens: int, length: float, adapter: int = 0
) -> float:
    """FLOPs that a step requires, without padding and logits of tokens without a label.

    Args:
        tokens: number of tokens, without padding.
        trained_tokens: number of tokens with a label.
        length: average document length in tokens.
        adapter: parameters of a low-rank adapter on frozen weights; 0 if all weights are trained.
    """
    passes = 2 if adapter else 3
    inside = shape.multiplied - shape.head_weights
    scores = 3 * 2.0 * shape.layers * shape.query * length
    per_token = passes * 2.0 * inside + 6.0 * adapter + scores
    return tokens * per_token + trained_tokens * passes * 2.0 * shape.head_weights


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    """Time of matrix products, without those of `scoring` and `sampling`."""
    launches: float
    """Time to launch all operations of the step, one by one."""
    moves: float
    """Time of operations other than products, with that of the optimizer."""
    updates: float
    """Time of the optimizer, and of the gradient's norm."""
    communication: float
    offload: float
    sampling: float
    """A step's share of the sampling of completions that all have the maximum length."""
    scoring: float
    """Forward passes without gradient before the step."""
    step: float
    bound: Bound
    tokens: int
    """Tokens per step, over all processes."""
    flops: float
    """FLOPs per process and step, without those of `scoring` and `sampling`."""
    reached: float
    """Assumed share of the GPU's rate that products reach."""
    overlap: float
    flops_per_token: float

    @property
    def training(self) -> float:
        """Seconds of forward and backward passes, and of the optimizer."""
        return self.step - self.sampling - self.scoring

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step


def communication_seconds(
    moved: Volume, machine: Machine, workload: Workload
) -> tuple[float, float]:
    """Seconds per step of communication on its links, and of what blocks computation.

    Between layers or stages of a divided model computation waits.
    """
    if workload.layout.axes.any:
        links = traffic.links(moved, workload, machine)
        blocking = sum(link.seconds for link in links if link.axis in moved.axes)
        return sum(link.seconds for link in links), blocking
    across = machine.nodes > 1 and workload.layout.group > machine.per_node
    inside = machine.ring(machine.per_node) if across else machine.link
    seconds = moved.inside / (inside * EFFICIENCY) if moved.inside else 0.0
    if moved.between:
        seconds += moved.between / ((machine.network or machine.link) * EFFICIENCY)
    return seconds, 0.0


def offload_seconds(workload: Workload, machine: Machine) -> float:
    """Seconds per step of offloading: copies over PCIe, AdamW on the CPU, and disk access."""
    layout = workload.layout
    if workload.cpu:
        return 0.0
    lane = machine.gpu.pcie * PCIE_EFFICIENCY
    waiting = 2 * workload.accumulation * workload.waiting_activations / lane
    if layout.offload == "none":
        return waiting
    moved = workload.trained * (workload.gradient_width + workload.compute)
    if layout.offload == "all":
        weights = workload.shape.layers * workload.unit_bytes + workload.outer_bytes
        moved += 2 * workload.accumulation * weights
    seconds = moved / layout.group / lane
    seconds += workload.trained / layout.group * CPU_ADAM_BYTES * machine.per_node / HOST_BANDWIDTH
    if layout.device == "nvme":
        # Weights, states and gradients are read and written on the process's share of the disk.
        states = 2 * nvme.STATE_BUFFERS * nvme.STATE_WIDTH * workload.trained / layout.group
        weights = 2 * workload.accumulation * nvme.Swapped(workload).waiting_weights
        seconds += (states + weights) / (NVME_BANDWIDTH / machine.per_node)
    return waiting + seconds


def times(
    workload: Workload, machine: Machine, moved: Volume, slots: float | None = None,
    length: float | None = None,
) -> Times:  # fmt: skip
    """Times of a step: the longer of computation and transfers, plus the part without overlap.

    Args:
        slots: tokens per step and process, including padding; by default `workload.filled`.
        length: average document length in tokens, for attention; by default `workload.document`.
    """
    length = length or workload.document or workload.length
    per_token = flops_per_token(
        workload.shape, length, True, workload.adapter is not None,
        workload.recomputes,
    )  # fmt: skip
    layout = workload.layout
    if slots is None:  # processes that train on the same rows divide the work
        slots = workload.tokens * workload.filled * workload.accumulation / layout.axes.processes
    tokens = float(slots)
    if workload.teacher_shape is not None:
        per_token += 2.0 * workload.teacher_shape.multiplied  # one forward pass
    work = per_token * tokens
    waits = schedules.bubble(layout.axes, workload.accumulation)
    products = work
    if not workload.cpu:
        products += slower_attention(workload, length) * tokens
    compute = products / machine.gpu.attained(workload.compute, workload.fp16) / (1 - waits)
    rest = operations(stage_workload.here(workload) if layout.axes.any else workload, tokens)
    starting = 0.0 if workload.cpu else waiting(workload)
    launches = rest.started * machine.gpu.launch
    # Without other processes to wait for, the host only starts work.
    launches += starting * (layout.group == 1)
    layers, loss = 1.0, 1.0
    if not workload.cpu:
        layers, loss = (LAYERS_FULL if workload.adapter is None else LAYERS_ADAPTER), LOSS
        layers *= COMPILED if workload.compiled else 1.0
    updates = rest.updates / layout.share("optimizer") * (layout.offload == "none")
    updates /= machine.gpu.bandwidth
    moved_here = layers * rest.layers + loss * rest.loss
    if workload.dequantizes and not workload.cpu:
        packed = workload.shape.layers * workload.shape.linear_weights
        moved_here += DEQUANTIZED * packed * passes(workload) * workload.accumulation
    moves = moved_here / (1 - waits) / machine.gpu.bandwidth + updates
    here = compute + launches + moves if workload.cpu else max(compute + moves, launches)
    links, blocked = communication_seconds(moved, machine, workload)
    offload = offload_seconds(workload, machine)
    overlap = OVERLAP_FAST if machine.fast else OVERLAP_SLOW
    moving = max(0.0, links + offload - blocked)
    blocked += starting * (layout.group > 1)
    training = blocked + max(here, moving) + (1 - overlap) * min(here, moving)
    bound: Bound = "launches" if launches > compute + moves else "compute"
    if blocked + moving > here:
        bound = "offload" if offload > links else "communication"
    scoring = here * workload.ahead / passes(workload)
    sampled = sampling(workload, machine)
    drawn = 0.0
    if sampled is not None and sampled.seconds is not None and workload.sampled is not None:
        drawn = sampled.seconds / workload.sampled.updates
    bound = "sampling" if drawn > training else bound
    total = round(tokens * layout.processes)
    return Times(
        compute, launches, moves, updates, links, offload, drawn, scoring,
        drawn + scoring + training, bound, total, work, machine.gpu.reached, overlap, per_token,
    )  # fmt: skip


def slower_attention(workload: Workload, length: float) -> float:
    """FLOPs per token at the rate of products that take as long as what attention adds to them."""
    shape = workload.shape
    forward = 2.0 * shape.layers * shape.query * length  # half of it is masked
    again = 1 + workload.recomputes
    return forward * ((again + ATTENTION_BACKWARD) / ATTENTION - (again + 2))


def waiting(workload: Workload) -> float:
    """Seconds of a step in which collectives start, one after the other.

    FSDP gathers each layer for both passes, and ZeRO-3 each module, with hooks in Python.
    """
    layout, shape = workload.layout, workload.shape
    again = 1 + (layout.shard == "params")
    if layout.for_own_module:
        adapted = 0 if workload.adapter is None else 2 * len(workload.adapter.ranks)
        each = again * (len(shape.matrices) + shape.norms + adapted) * HOOKS
    elif layout.traits.shards_all and layout.group > 1:
        each = (again + workload.trains_all) * GATHER
    else:
        return 0.0
    return workload.accumulation * shape.layers * each
