"""From bytes that tensors hold to what the allocator reserves and the process shows."""

import dataclasses

from finetune.planner.memory import Timeline
from finetune.planner.workload import Workload

# Published ratios of reserved to allocated: 1.03 to 1.08 on one GPU with steady shapes; 1.06 to
# 1.35 with FSDP, whose units come and go (AnswerDotAI/fsdp_qlora, benchmarks of 2024-03). The
# middle of each range is the estimate, its ends the band.
FRAGMENTATION = (1.03, 1.08)
FRAGMENTATION_SHARDED = (1.06, 1.35)
# A CUDA context takes 0.14 GB (T4, measured by fitcheck) to 0.5 GB, cuBLAS workspaces 32 MiB on
# Hopper, bitsandbytes and Triton modules 0.1 GB.
CONTEXT = 0.5e9
KERNELS = 0.1e9
# NCCL's buffers and channels: 0.3 GB within a node, up to 1 GB over several.
NCCL = 0.3e9
NCCL_NODES = 1.0e9


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
    """Band of `process`: nothing lost in the allocator, and the most that was published."""


def overhead(workload: Workload, nodes: int = 1) -> float:
    """Bytes outside PyTorch's allocator."""
    several = workload.layout.processes > 1
    return CONTEXT + KERNELS + (NCCL if nodes == 1 else NCCL_NODES) * several


def of(timeline: Timeline, workload: Workload, nodes: int = 1) -> Totals:
    allocated = timeline.peak.total
    outside = overhead(workload, nodes)
    sharded = workload.layout.engine in ("fsdp", "deepspeed") and workload.layout.group > 1
    lowest, highest = FRAGMENTATION_SHARDED if sharded else FRAGMENTATION
    reserved = allocated * (lowest + highest) / 2
    return Totals(
        allocated,
        reserved,
        reserved + outside,
        allocated * lowest + outside,
        allocated * highest + outside,
    )
