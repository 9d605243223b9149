"""Predict the time of a step with a roofline model: FLOPs on the GPU, bytes on the links."""

import dataclasses

from finetune.planner import schedules
from finetune.planner.estimate import stage_workload, traffic
from finetune.planner.estimate.autograd.operations import operations
from finetune.planner.estimate.communication import Volume
from finetune.planner.estimate.hardware import EFFICIENCY, Bound, Machine
from finetune.planner.estimate.sharding import nvme
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture

# Fraction of communication that overlaps with computation: an assumption for NVLink (FSDP2
# prefetches one unit; DDP's buckets start with the first gradients), and half of it for slower
# links.
OVERLAP_FAST = 0.7
OVERLAP_SLOW = 0.35
# CPU AdamW reads and writes 28 bytes per parameter (weights, moments and gradient in fp32, the bf16
# copy); the memory of a server moves 100 GB/s.
CPU_ADAM_BYTES = 28
HOST_BANDWIDTH = 100e9
# One NVMe drive of 2023 reads 3 to 6 GB/s.
NVME_BANDWIDTH = 4e9
# Pinned copies reach about this fraction of PCIe's peak rate (25 of 32 GB/s, 50 of 64).
PCIE_EFFICIENCY = 0.78
# On a GPU `mfu` includes operations other than products, which take longer in narrow models with
# large vocabularies: a step takes at least this share of the peak rate for its products, and these
# multiples of the bytes of the other operations in bf16, which PyTorch runs one by one (in fp32 if
# all weights are trained). Fitted to three models on an H100: docs/gpu.md.
PRODUCTS = 0.68
LAYERS_FULL, LAYERS_ADAPTER, LOSS = 2.5, 1.1, 5.0
# Seconds on the host to launch an operation: an assumption. A GPU computes at the same time, and is
# idle if its work is shorter: a Llama with 32 layers in transformers takes about 25 ms to decode a
# token on any GPU. On a CPU, launching and computing do not overlap.
LAUNCH = 10e-6
LAUNCH_CPU = 15e-6


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


def forward_share(workload: Workload) -> float:
    """Fraction of a step's computation in one forward pass; passes without gradient count too."""
    forward = 1 / _passes(workload)
    return forward / (1 + workload.ahead * forward)


def _passes(workload: Workload) -> float:
    """Computation of a step including gradients, in forward passes.

    Weights that are frozen have no gradient, and layers before the first trained one no pass back.
    """
    share, layers = workload.share, workload.shape.layers
    if workload.adapter is not None:
        return 2.0 + workload.recomputes
    if share is None:
        return 3.0 + workload.recomputes
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
    launches: float
    """Time to launch all operations of the step, one by one."""
    moves: float
    """Time of pointwise operations; a GPU's `mfu` includes them up to a share."""
    communication: float
    offload: float
    step: float
    bound: Bound
    tokens: int
    """Tokens per step, over all processes."""
    flops: float
    """FLOPs per process and step."""
    mfu: float
    overlap: float
    flops_per_token: float
    break_even: float
    """Tokens per micro-step from which copies over PCIe take less time than computation; 0 if
    nothing is copied."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step


def attained(machine: Machine, workload: Workload) -> float:
    """FLOP/s that a GPU is assumed to reach in the workload's precision."""
    gpu = machine.gpu
    if workload.compute == 4:
        return gpu.flops * gpu.mfu * gpu.single
    return gpu.flops * gpu.mfu * (1.0 if workload.fp16 else gpu.half)


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
    inside = min(machine.link, machine.network) if across else machine.link
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
    seconds = copy_seconds(workload, machine)
    if layout.offload == "none":
        return waiting
    seconds += workload.trained / layout.group * CPU_ADAM_BYTES * machine.per_node / HOST_BANDWIDTH
    if layout.device == "nvme":
        # Weights, states and gradients are read and written on the process's share of the disk.
        states = 2 * nvme.STATE_BUFFERS * nvme.STATE_WIDTH * workload.trained / layout.group
        weights = 2 * workload.accumulation * nvme.Swapped(workload).waiting_weights
        seconds += (states + weights) / (NVME_BANDWIDTH / machine.per_node)
    return waiting + seconds


def copy_seconds(workload: Workload, machine: Machine) -> float:
    """Seconds per step of copying offloaded weights, gradients and updates over PCIe."""
    layout = workload.layout
    if layout.offload == "none" or workload.cpu:
        return 0.0
    moved = workload.trained * (workload.gradient_width + workload.compute)
    if layout.offload == "all":
        weights = workload.shape.layers * workload.unit_bytes + workload.outer_bytes
        moved += 2 * workload.accumulation * weights
    return moved / layout.group / (machine.gpu.pcie * PCIE_EFFICIENCY)


def times(
    workload: Workload, machine: Machine, moved: Volume, slots: float | None = None,
    length: float | None = None,
) -> Times:  # fmt: skip
    """Times of a step: the longer of computation and transfers, plus the part without overlap.

    Args:
        slots: tokens per step and process, including padding; by default all rows are full.
        length: average document length in tokens, for attention; by default the row length.
    """
    per_token = flops_per_token(
        workload.shape, length or workload.length, True, workload.adapter is not None,
        workload.recomputes,
    )  # fmt: skip
    layout = workload.layout
    if slots is None:  # processes that train on the same rows divide the work
        slots = workload.tokens * workload.accumulation / layout.axes.processes
    tokens = float(slots)
    if workload.teacher_shape is not None:
        per_token += 2.0 * workload.teacher_shape.multiplied  # one forward pass
    work = per_token * tokens * (1 + workload.ahead / _passes(workload))
    compute = work / attained(machine, workload)
    waits = schedules.bubble(layout.axes, workload.accumulation)
    compute /= 1 - waits
    rest = operations(stage_workload.here(workload) if layout.axes.any else workload, tokens)
    launches = rest.started * (LAUNCH_CPU if workload.cpu else LAUNCH)
    if workload.cpu:
        moves = (rest.layers + rest.loss + rest.updates) / machine.gpu.bandwidth
        here = compute + launches + moves
    else:
        # Operations other than products, the same for every engine.
        narrow = workload
        if workload.scheme != "fp32":
            narrow = dataclasses.replace(workload, scheme="fsdp")
        others = operations(stage_workload.here(narrow) if layout.axes.any else narrow, tokens)
        factor = LAYERS_FULL if workload.adapter is None else LAYERS_ADAPTER
        moves = (factor * others.layers + LOSS * others.loss) / machine.gpu.bandwidth / (1 - waits)
        here = max(compute, launches, compute * machine.gpu.mfu / PRODUCTS + moves)
    links, blocked = communication_seconds(moved, machine, workload)
    offload = offload_seconds(workload, machine)
    overlap = OVERLAP_FAST if machine.fast else OVERLAP_SLOW
    moving = links - blocked + offload
    step = blocked + max(here, moving) + (1 - overlap) * min(here, moving)
    bound: Bound = "launches" if launches > compute else "compute"
    if blocked + moving > here:
        bound = "offload" if offload > links else "communication"
    total = round(tokens * layout.processes)
    even = copy_seconds(workload, machine) / compute * workload.tokens
    return Times(
        compute, launches, moves, links, offload, step, bound, total, work, machine.gpu.mfu,
        overlap, per_token, even,
    )  # fmt: skip
