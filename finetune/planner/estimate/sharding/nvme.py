"""What DeepSpeed 0.19 keeps where it offloads to NVMe: on the disk, and in host memory to reach it.

Read in `zero/stage3.py` and `swap_tensor/`. P trained parameters on N processes; each process has

    on the disk        its share of every tensor of `SWAPPABLE` bytes and more, as it is computed
                       with; 16 P / N: master weights, two moments and the gradient in fp32
    in host memory     `WEIGHT_BUFFERS` times the largest share of a tensor
                       of up to `HELD` trained weights a copy as they are computed with
                       4 P / N: gradients as they are added up
                       `STATE_BUFFERS` times 4 S: of one sub-group, S elements, what is on the disk
"""

from finetune.planner.estimate.workload import Workload

WEIGHT_BUFFERS = 5
"""Shares of tensors on their way between disk and device. DeepSpeed's default."""
STATE_BUFFERS = 4
"""Weights, two moments and a gradient: what is there of a sub-group while it is updated."""
SUB_GROUP = 100_000_000
"""Elements of a share that are updated at a time: a tenth of DeepSpeed's default, which would take
16 GB of host memory for each process."""
HELD = 1_000_000_000
"""Trained elements of a share that stay in host memory: DeepSpeed's default of `max_in_cpu`."""
SWAPPABLE = 1 << 20
"""Bytes of a share from which it goes to the disk: the block size that the engine here sets."""
STATE_WIDTH = 4


def largest(workload: Workload) -> int:
    """Elements of one process's share of the largest tensor."""
    return -(-max(_tensors(workload)) // workload.layout.group)


def _tensors(workload: Workload) -> dict[int, int]:
    """Tensors of a base by their number of elements; vectors left out, which never leave."""
    shape = workload.shape
    sizes = [matrix.weights for matrix in shape.matrices] * shape.layers
    sizes += [shape.embedding] * (1 if shape.tied else 2)
    if shape.experts is not None:
        expert = shape.experts.count * shape.hidden * shape.experts.width
        sizes += [2 * expert, expert] * shape.layers  # gate and up are one tensor
    return {size: sizes.count(size) for size in set(sizes)}


def _swapped(workload: Workload) -> float:
    """Bytes of one process's shares of the base that go to the disk."""
    shares = {-(-size // workload.layout.group): n for size, n in _tensors(workload).items()}
    width = workload.compute
    return sum(float(n * size * width) for size, n in shares.items() if size * width >= SWAPPABLE)


def _share(workload: Workload) -> float:
    return workload.trained / workload.layout.group


def disk(workload: Workload) -> float:
    """Bytes of one process on the disk."""
    if workload.layout.device != "nvme":
        return 0.0
    states = STATE_BUFFERS * STATE_WIDTH * _share(workload)
    return _swapped(workload) + (states if states >= SWAPPABLE else 0.0)


def weights(workload: Workload) -> float:
    """Bytes of weights in one process's host memory between their uses."""
    held = min(HELD, _share(workload)) * workload.compute
    if workload.adapter is None:
        return held
    return held + workload.frozen_bytes / workload.layout.group - _swapped(workload)


def waiting_weights(workload: Workload) -> float:
    """Bytes of weights that a process reads from the disk in each pass."""
    if workload.adapter is not None:
        return _swapped(workload)
    return max(0.0, _share(workload) - HELD) * workload.compute


def buffers(workload: Workload) -> float:
    """Bytes of one process's host memory for weights on their way."""
    return float(WEIGHT_BUFFERS * largest(workload) * workload.compute)


def states(workload: Workload) -> float:
    """Bytes of one process's host memory for the optimizer's states while they are updated."""
    updated = min(_share(workload), SUB_GROUP + largest(workload))
    return STATE_BUFFERS * STATE_WIDTH * updated


def host(workload: Workload) -> float:
    """Bytes of host memory that one process needs in all."""
    gradients = STATE_WIDTH * _share(workload)
    return weights(workload) + buffers(workload) + states(workload) + gradients
