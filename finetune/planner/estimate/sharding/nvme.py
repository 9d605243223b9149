"""Disk space and host buffers of DeepSpeed 0.19's offload to NVMe.

Derived from `zero/stage3.py` and `swap_tensor/`. With P trained parameters on N processes, each
process has

    on disk            its shard of every tensor with at least `SWAPPABLE` bytes, in the compute
                       data type; 16 P / N: master weights, two moments and the gradient in fp32
    in host memory     `WEIGHT_BUFFERS` times the largest shard of a tensor
                       a copy of up to `HELD` trained weights in the compute data type
                       4 P / N: accumulated gradients
                       `STATE_BUFFERS` times 4 S: the states on disk of one sub-group, S elements
"""

from finetune.planner.estimate.workload import Workload

WEIGHT_BUFFERS = 5
"""Number of buffers for shards in transfer between disk and device. DeepSpeed's default."""
STATE_BUFFERS = 4
"""Number of states in memory while a sub-group is updated: weights, two moments, a gradient."""
SUB_GROUP = 100_000_000
"""Elements of a shard that are updated at a time: a tenth of DeepSpeed's default, which would need
16 GB of host memory per process."""
HELD = 1_000_000_000
"""Trained elements of a shard that stay in host memory. DeepSpeed's default of `max_in_cpu`."""
SWAPPABLE = 1 << 20
"""Minimum bytes of a shard that is moved to disk: the block size that the engine here sets."""
STATE_WIDTH = 4


def largest(workload: Workload) -> int:
    """Elements of one process's shard of the largest tensor."""
    return -(-max(_tensors(workload)) // workload.layout.group)


def _tensors(workload: Workload) -> dict[int, int]:
    """Number of tensors of the base by their number of elements, without vectors (never moved)."""
    shape = workload.shape
    sizes = [matrix.weights for matrix in shape.matrices] * shape.layers
    sizes += [shape.embedding] * (1 if shape.tied else 2)
    if shape.experts is not None:
        expert = shape.experts.count * shape.hidden * shape.experts.width
        sizes += [2 * expert, expert] * shape.layers  # gate and up are one tensor
    return {size: sizes.count(size) for size in set(sizes)}


def _swapped(workload: Workload) -> float:
    """Bytes of one process's shards of the base that are moved to disk."""
    shares = {-(-size // workload.layout.group): n for size, n in _tensors(workload).items()}
    width = workload.compute
    return sum(float(n * size * width) for size, n in shares.items() if size * width >= SWAPPABLE)


def _share(workload: Workload) -> float:
    return workload.trained / workload.layout.group


def disk(workload: Workload) -> float:
    """Bytes of one process on disk."""
    if workload.layout.device != "nvme":
        return 0.0
    states = STATE_BUFFERS * STATE_WIDTH * _share(workload)
    return _swapped(workload) + (states if states >= SWAPPABLE else 0.0)


def weights(workload: Workload) -> float:
    """Bytes of weights that stay in one process's host memory."""
    held = min(HELD, _share(workload)) * workload.compute
    if workload.adapter is None:
        return held
    return held + workload.frozen_bytes / workload.layout.group - _swapped(workload)


def waiting_weights(workload: Workload) -> float:
    """Bytes of weights that a process reads from disk in each pass."""
    if workload.adapter is not None:
        return _swapped(workload)
    return max(0.0, _share(workload) - HELD) * workload.compute


def buffers(workload: Workload) -> float:
    """Bytes of one process's host memory for weights in transfer."""
    return float(WEIGHT_BUFFERS * largest(workload) * workload.compute)


def states(workload: Workload) -> float:
    """Bytes of one process's host memory for optimizer states during their update."""
    updated = min(_share(workload), SUB_GROUP + largest(workload))
    return STATE_BUFFERS * STATE_WIDTH * updated


def host(workload: Workload) -> float:
    """Total bytes of host memory of one process."""
    gradients = STATE_WIDTH * _share(workload)
    return weights(workload) + buffers(workload) + states(workload) + gradients
