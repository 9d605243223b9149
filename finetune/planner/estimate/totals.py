"""From bytes that tensors hold to what the allocator reserves and the process shows."""

import dataclasses
import math

from finetune.planner.estimate.hardware import GPU, NCCL, Machine
from finetune.planner.estimate.memory import Timeline
from finetune.planner.estimate.workload import Workload

# Published ratios of reserved to allocated: least, usual, most. On one GPU with steady shapes 1.03
# to 1.08. Sharded, where units come and go: 1.01 (Qwen-72B, LoRA under ZeRO-3, 8192 tokens: 72.3 GB
# a card, 70.8 planned), 1.03 (AnswerDotAI/fsdp_qlora, 10 rows: 20.97 GiB reserved, 20.4 planned),
# 1.19 (torchtitan, 8B under FSDP2); with FSDP1 in 2024 up to 1.35, which FSDP2's streams avoid.
FRAGMENTATION = (1.03, 1.055, 1.08)
FRAGMENTATION_SHARDED = (1.01, 1.12, 1.20)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Peak of one process in bytes, by three ways of counting."""

    allocated: float
    """Alive tensors: torch.cuda.max_memory_allocated."""
    reserved: float
    """Taken by PyTorch's allocator: max_memory_reserved."""
    process: float
    """What nvidia-smi shows."""
    low: float
    high: float
    """Band of `process`: the least and the most that the allocator is taken to lose."""


def _ratios(workload: Workload) -> tuple[float, float, float]:
    sharded = workload.layout.engine in ("fsdp", "deepspeed") and workload.layout.group > 1
    return FRAGMENTATION_SHARDED if sharded else FRAGMENTATION


def expected(allocated: float, workload: Workload, machine: Machine) -> float:
    """Bytes of a process whose tensors take so many, if the card had no end."""
    return allocated * _ratios(workload)[1] + machine.outside


def of(timeline: Timeline, workload: Workload, machine: Machine | None = None) -> Totals:
    """The three totals of a workload's peak on a machine; by default nodes of usual GPUs.

    PyTorch's allocator gives back what it keeps in reserve before it fails: where the tensors fit,
    a process takes no more than the card has.
    """
    several = workload.layout.processes > 1
    outside = GPU.context + NCCL * several if machine is None else machine.outside
    allocated = timeline.peak.total
    fits = machine is not None and allocated <= machine.usable
    limit = machine.gpu.memory if machine is not None and fits else math.inf
    least, usual, most = (allocated * ratio for ratio in _ratios(workload))
    return Totals(
        allocated,
        min(usual, limit - outside),
        min(usual + outside, limit),
        least + outside,
        min(most + outside, limit),
    )
