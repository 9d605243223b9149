"""Memory of DeepSpeed 0.19's gradients in bf16 training with fp32 accumulation.

Derived from `bf16_optimizer.py` (ZeRO-1), `zero/stage_1_and_2.py` (ZeRO-2), `zero/stage3.py` and
`engine.py`; `python -m benchmarks memory` compares the sums with measurements. Bytes for P trained
parameters on N processes and buckets of B elements (at most P in the engine here):

              always allocated    during backward        during reduction
    ZeRO-1    4 P                 2 P                    a copy of all in bf16, and one in fp32
    ZeRO-2    -                   2 B (on GPUs 4 B)      2 min(B, P), and 4 P / N from then on
    ZeRO-3    4 P / N and 2 B     -                      2 min(B, P) and 4 min(B, P) / N

With the optimizer on the host, the host also holds the fp32 gradients that it reads, 4 P / N.
ZeRO-2 still keeps its own gradients on the device; on the host it holds the updated weights in
bf16, 2 P / N, and both host and device have a bf16 buffer for the largest parameter.
"""

from finetune.planner.estimate.workload import Workload

# DeepSpeed's default: elements of a gradient bucket, which is always allocated in full.
REDUCE_BUCKET = 500_000_000
# DeepSpeed's default for ZeRO-3: elements that are updated at a time.
SUB_GROUP = 1_000_000_000


class Gradients:
    """Bytes of the gradients of one process, for each part of a step."""

    def __init__(self, workload: Workload) -> None:
        layout, shard, trained = workload.layout, workload.layout.shard, workload.trained
        share, offloads = trained / layout.group, layout.offload != "none"
        self.accumulates = workload.wide_gradients and workload.scheme == "deepspeed"
        """Whether this applies: bf16, and an engine that sets `data_types.grad_accum_dtype`."""
        self.leave = offloads and not (workload.cpu or (self.accumulates and shard == "grads"))
        """Whether reduced gradients are moved to the host, outside the device's memory."""
        # ZeRO-2's buffer for the transfer of a gradient, on the device and on the host; negligible
        # for adapters.
        full = workload.adapter is None
        passing = 2.0 * workload.shape.embedding * (offloads and shard == "grads" and full)
        unsharded = {"optimizer": 4.0 * trained, "params": 4.0 * share}
        self.standing = unsharded.get(shard, 0.0) + passing
        """Always allocated."""
        if workload.cpu and offloads and layout.device != "nvme":
            # Host memory is counted, with what offloading keeps there beside the optimizer states.
            self.standing += 4.0 * share + (2.0 * share if shard == "grads" else 0.0) + passing
        self.reduced = {"optimizer": 2.0 * trained, "grads": 4.0 * share}.get(shard, 0.0)
        """After a backward pass, in addition to those always allocated."""
        self.overflows = shard != "optimizer" and trained > REDUCE_BUCKET
        """Whether a bucket fills up before the end of the backward pass."""
        bucket = 2.0 * min(REDUCE_BUCKET, trained)
        self.resident_bucket = bucket if shard == "params" else 0.0
        """The bucket that ZeRO-3 allocates at the start."""
        # On GPUs ZeRO-2 fills a second bucket while the first one is reduced.
        overlaps = not offloads and not workload.cpu and layout.processes > 1
        self.filling = bucket * (1 + overlaps) if shard == "grads" else self.resident_bucket
        """Buckets from the first gradient of a backward pass until its end."""
        # Matrices and vectors are concatenated if both fit in a bucket; all are sent as bf16.
        joined = full and trained <= REDUCE_BUCKET
        copies = {
            "optimizer": 2.0 * trained + (4.0 * trained if joined else 0.0),
            "params": bucket + 2.0 * bucket / layout.group,
        }
        self.reducing = copies.get(shard, bucket)
        """Copies during the reduction of gradients, in addition to the bucket."""
        whole = shard == "params" and not offloads
        self.updating = 4.0 * min(SUB_GROUP, share) if whole else 0.0
        """fp32 gradients copied by the optimizer step: ZeRO-3 concatenates a sub-group."""
