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


class Swapped:
    """Bytes of one process on disk and in its host memory."""

    def __init__(self, workload: Workload) -> None:
        shape, group, width = workload.shape, workload.layout.group, workload.compute
        # Elements of the base's tensors, without vectors (never moved).
        sizes = [matrix.weights for matrix in shape.matrices] * shape.layers
        sizes += [shape.embedding] * shape.tables
        if shape.experts is not None:
            expert = shape.experts.count * shape.hidden * shape.experts.width
            sizes += [2 * expert, expert] * shape.layers  # gate and up are one tensor
        shares = [-(-size // group) for size in sizes]
        swapped = sum(float(n * width) for n in shares if n * width >= SWAPPABLE)
        full, share = workload.adapter is None, workload.trained / group
        kept = STATE_BUFFERS * STATE_WIDTH * share
        self.disk = swapped + (kept if kept >= SWAPPABLE else 0.0)
        """On disk."""
        self.weights = min(HELD, share) * width
        """Weights that stay in host memory."""
        self.waiting_weights = max(0.0, share - HELD) * width if full else swapped
        """Weights that are read from disk in each pass."""
        self.weights += workload.frozen_bytes / group - (0.0 if full else swapped)
        self.buffers = float(WEIGHT_BUFFERS * max(shares) * width)
        """Host memory for weights in transfer."""
        self.states = STATE_BUFFERS * STATE_WIDTH * min(share, SUB_GROUP + max(shares))
        """Host memory for optimizer states during their update."""
        self.host = self.weights + self.buffers + self.states + STATE_WIDTH * share
