"""Convert bytes of tensors to bytes reserved by the allocator and used by the process."""

import dataclasses
import math

from finetune.planner.estimate.hardware import GPU, NCCL, Machine
from finetune.planner.estimate.moments import Moment, Timeline
from finetune.planner.estimate.workload import Workload

# Published ratios of reserved to allocated bytes: lowest, typical, highest. On one GPU with
# constant shapes 1.03 to 1.08. Sharded, with units gathered and freed, of six runs: 1.02 (Qwen-72B,
# LoRA under ZeRO-3), 1.03 and 1.20 (AnswerDotAI/fsdp_qlora, 10 and 6 rows), 1.09, 1.22 and 1.24
# (torchtitan, 8B under FSDP2 on 128 GPUs, on 8, and with rows divided by 8). FSDP1 in 2024 reached
# 1.35, which the streams of FSDP2 avoid.
FRAGMENTATION = (1.03, 1.055, 1.08)
FRAGMENTATION_SHARDED = (1.01, 1.14, 1.24)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Peak memory of one process in bytes, counted in three ways."""

    allocated: float
    """Live tensors: `torch.cuda.max_memory_allocated`."""
    reserved: float
    """Reserved by PyTorch's allocator: `torch.cuda.max_memory_reserved`."""
    process: float
    """As shown by nvidia-smi."""
    low: float
    high: float
    """Range of `process`, with the lowest and highest assumed fragmentation."""


def _ratios(workload: Workload, peak: Moment) -> tuple[float, float, float]:
    sharded = workload.layout.traits.shards and workload.layout.group > 1
    return FRAGMENTATION_SHARDED if sharded and peak.name != "loading" else FRAGMENTATION


def expected(peak: Moment, workload: Workload, machine: Machine) -> float:
    """Bytes of a process with this peak, on a card without a memory limit."""
    return peak.total * _ratios(workload, peak)[1] + machine.outside


def of(timeline: Timeline, workload: Workload, machine: Machine | None = None) -> Totals:
    """The three totals of a workload's peak on a machine; by default nodes of typical GPUs.

    PyTorch's allocator frees its cached memory before it runs out of memory: if the tensors fit, a
    process does not need more than the memory of the card.
    """
    several = workload.layout.processes > 1
    outside = GPU.context + NCCL * several if machine is None else machine.outside
    allocated = timeline.peak.total
    fits = machine is not None and allocated <= machine.usable
    limit = machine.gpu.memory if machine is not None and fits else math.inf
    least, usual, most = (allocated * ratio for ratio in _ratios(workload, timeline.peak))
    return Totals(
        allocated,
        min(usual, limit - outside),
        min(usual + outside, limit),
        least + outside,
        min(most + outside, limit),
    )
