"""Predict the time of a step with a roofline: FLOPs against the GPU, bytes against the links."""

import dataclasses

from finetune.planner import schedules
from finetune.planner.estimate import part, traffic
from finetune.planner.estimate.autograd.operations import operations
from finetune.planner.estimate.communication import Volume
from finetune.planner.estimate.hardware import EFFICIENCY, Bound, Machine
from finetune.planner.estimate.sharding import nvme
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture

# Share of communication that runs beside computation: an assumption for NVLink (FSDP2 prefetches a
# unit ahead; DDP's buckets start with the first gradients), half of it on slower links.
OVERLAP_FAST = 0.7
OVERLAP_SLOW = 0.35
# CPU AdamW reads and writes 28 bytes a parameter (weights, moments and gradient in fp32, the bf16
# copy); a server's memory moves 100 GB/s.
CPU_ADAM_BYTES = 28
HOST_BANDWIDTH = 100e9
# One NVMe drive of 2023 reads 3 to 6 GB/s.
NVME_BANDWIDTH = 4e9
# Pinned copies reach about this share of PCIe's peak rate (25 of 32 GB/s, 50 of 64).
PCIE_EFFICIENCY = 0.78
# Seconds until the next operation has been started, on the host: an assumption. A GPU runs at the
# same time, and waits where its own work is shorter; transformers' Llama of 32 layers takes about
# 25 ms to decode a token on any GPU. A CPU does one after the other.
LAUNCH = 10e-6
LAUNCH_CPU = 15e-6


def flops_per_token(
    shape: Architecture, length: float, causal: bool = True, adapter: bool = False,
    recompute: bool = False,
) -> float:  # fmt: skip
    """FLOPs of training per token: 2 per weight and pass, and attention's scores.

    Three passes (forward, gradient of inputs, gradient of weights); with frozen weights the last is
    absent; recomputation repeats the first. Attention's own products have no weights: forward once
    and backward twice in either case.
    """
    weights = 2.0 * shape.multiplied
    scores = 4.0 * shape.layers * shape.query * length * (0.5 if causal else 1.0)
    passes = 2 if adapter else 3
    extra = 1 if recompute else 0
    return (passes + extra) * weights + (3 + extra) * scores


def forward_share(workload: Workload) -> float:
    """A forward pass as a share of what a step computes, passes without gradient included."""
    forward = 1 / _passes(workload)
    return forward / (1 + workload.ahead * forward)


def _passes(workload: Workload) -> int:
    """Forward passes that a step with its gradients is as much work as."""
    recomputes = workload.checkpointing in ("full", "attention")
    return (2 if workload.adapter is not None else 3) + recomputes


def step_flops(
    shape: Architecture, tokens: int, trained_tokens: int, length: float, adapter: int = 0
) -> float:
    """FLOPs that a step cannot do without: no padding, no logits of tokens without a label.

    Args:
        tokens: real ones.
        length: of a document, on average.
        adapter: parameters of a low-rank adapter on frozen weights; 0 where all are trained.
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
    """Until all operations of the step were started, one by one."""
    moves: float
    """Of cheap operations, which a CPU is slow at; 0 on a GPU, whose `mfu` has them."""
    communication: float
    offload: float
    step: float
    bound: Bound
    tokens: int
    """Tokens of the whole job per step."""
    flops: float
    """Of one process per step."""
    mfu: float
    overlap: float
    flops_per_token: float
    break_even: float
    """Tokens of a micro-step from which copies over PCIe take less time than computing; 0 where
    nothing is copied."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step


def attained(machine: Machine, workload: Workload) -> float:
    """FLOPs a second that a GPU is assumed to reach in the workload's precision."""
    gpu = machine.gpu
    if workload.compute == 4:
        return gpu.flops * gpu.mfu * gpu.single
    return gpu.flops * gpu.mfu * (1.0 if workload.fp16 else gpu.half)


def communication_seconds(moved: Volume, machine: Machine, workload: Workload) -> float:
    """Seconds that the bytes of a step take on their links."""
    if workload.layout.axes.any:
        return sum(link.seconds for link in traffic.links(moved, workload, machine))
    group = workload.layout.group
    across = machine.nodes > 1 and group > machine.per_node
    inside = min(machine.link, machine.network) if across else machine.link
    seconds = moved.inside / (inside * EFFICIENCY) if moved.inside else 0.0
    if moved.between:
        seconds += moved.between / ((machine.network or machine.link) * EFFICIENCY)
    return seconds


def blocking_seconds(moved: Volume, machine: Machine, workload: Workload) -> float:
    """Seconds of those in which nothing is computed: each layer, or stage, waits for what comes."""
    if not workload.layout.axes.any:
        return 0.0
    links = traffic.links(moved, workload, machine)
    return sum(link.seconds for link in links if link.axis in moved.axes)


def offload_seconds(workload: Workload, machine: Machine) -> float:
    """Seconds of a step that go to the host: copies over PCIe, AdamW on the CPU, and the disk."""
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
        seconds += _disk_seconds(workload, NVME_BANDWIDTH / machine.per_node)
    return waiting + seconds


def copy_seconds(workload: Workload, machine: Machine) -> float:
    """Seconds of a step in which offloaded weights, gradients and updates cross PCIe."""
    layout = workload.layout
    if layout.offload == "none" or workload.cpu:
        return 0.0
    moved = workload.trained * (workload.gradient_width + workload.compute)
    if layout.offload == "all":
        weights = workload.shape.layers * workload.unit_bytes + workload.outer_bytes
        moved += 2 * workload.accumulation * weights
    return moved / layout.group / (machine.gpu.pcie * PCIE_EFFICIENCY)


def _disk_seconds(workload: Workload, lane: float) -> float:
    """Seconds of a step that a process reads and writes: weights, states and gradients.

    Args:
        lane: bytes a second of its share of the disk.
    """
    states = 2 * nvme.STATE_BUFFERS * nvme.STATE_WIDTH * workload.trained / workload.layout.group
    weights = 2 * workload.accumulation * nvme.waiting_weights(workload)
    return (states + weights) / lane


def times(
    workload: Workload, machine: Machine, moved: Volume, slots: float | None = None,
    length: float | None = None,
) -> Times:  # fmt: skip
    """The step as a roofline: the longer of computing and moving, and what they do not share.

    Args:
        slots: tokens of a step of one process, padding counted; by default all rows are full.
        length: tokens of a document on average, over which attention runs; by default a row's.
    """
    per_token = flops_per_token(
        workload.shape, length or workload.length, True, workload.adapter is not None,
        workload.checkpointing in ("full", "attention"),
    )  # fmt: skip
    layout = workload.layout
    if slots is None:  # of processes that train on the same rows each has its share
        slots = workload.tokens * workload.accumulation / layout.axes.processes
    tokens = float(slots)
    if workload.teacher_shape is not None:
        per_token += 2.0 * workload.teacher_shape.multiplied  # one forward pass
    work = per_token * tokens * (1 + workload.ahead / _passes(workload))
    compute = work / attained(machine, workload)
    waits = schedules.bubble(layout.axes, workload.accumulation)
    compute /= 1 - waits
    rest = operations(part.here(workload) if layout.axes.any else workload, tokens)
    launches = rest.started * (LAUNCH_CPU if workload.cpu else LAUNCH)
    moves = rest.moved / machine.gpu.bandwidth if workload.cpu else 0.0
    here = compute + launches + moves if workload.cpu else max(compute, launches)
    links = communication_seconds(moved, machine, workload)
    blocked = blocking_seconds(moved, machine, workload)
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
