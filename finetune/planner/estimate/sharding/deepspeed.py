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


def accumulates(workload: Workload) -> bool:
    """Whether this module applies: bf16, and an engine that sets `data_types.grad_accum_dtype`."""
    return workload.wide_gradients and workload.scheme == "deepspeed"


def _share(workload: Workload) -> float:
    return workload.trained / workload.layout.group


def standing(workload: Workload) -> float:
    """Bytes of gradients that are always allocated."""
    unsharded = {"optimizer": 4.0 * workload.trained, "params": 4.0 * _share(workload)}
    found = unsharded.get(workload.layout.shard, 0.0) + _passing(workload)
    return found + _on_host(workload) if workload.cpu else found  # host memory is counted


def leave(workload: Workload) -> bool:
    """Whether reduced gradients are moved to the host, outside the device's memory."""
    offloaded = workload.layout.offload != "none" and not workload.cpu
    return offloaded and not (accumulates(workload) and workload.layout.shard == "grads")


def _on_host(workload: Workload) -> float:
    """Bytes that offloading keeps on the host in addition to the optimizer states."""
    if workload.layout.offload == "none" or workload.layout.device == "nvme":
        return 0.0
    written = 2.0 * _share(workload) if workload.layout.shard == "grads" else 0.0
    return 4.0 * _share(workload) + written + _passing(workload)


def _passing(workload: Workload) -> float:
    """Bytes of ZeRO-2's buffer for the transfer of a gradient; negligible for adapters.

    The buffer exists on the device and on the host.
    """
    passes = workload.layout.offload != "none" and workload.layout.shard == "grads"
    return 2.0 * workload.shape.embedding if passes and workload.adapter is None else 0.0


def reduced(workload: Workload) -> float:
    """Bytes of gradients after a backward pass, in addition to those always allocated."""
    unsharded = {"optimizer": 2.0 * workload.trained, "grads": 4.0 * _share(workload)}
    return unsharded.get(workload.layout.shard, 0.0)


def overflows(workload: Workload) -> bool:
    """Whether a bucket fills up before the end of the backward pass."""
    return workload.layout.shard != "optimizer" and workload.trained > REDUCE_BUCKET


def _bucket(workload: Workload) -> float:
    """Bytes of a bucket."""
    return 2.0 * min(REDUCE_BUCKET, workload.trained)


def _overlaps(workload: Workload) -> bool:
    """Whether ZeRO-2 fills a second bucket while the first one is reduced, as it does on GPUs."""
    layout = workload.layout
    return layout.offload == "none" and not workload.cpu and layout.processes > 1


def resident_bucket(workload: Workload) -> float:
    """Bytes of the bucket that ZeRO-3 allocates at the start."""
    return _bucket(workload) if workload.layout.shard == "params" else 0.0


def filling(workload: Workload) -> float:
    """Bytes of buckets from the first gradient of a backward pass until its end."""
    if workload.layout.shard == "grads":
        return _bucket(workload) * (2 if _overlaps(workload) else 1)
    return resident_bucket(workload)


def reducing(workload: Workload) -> float:
    """Bytes of copies during the reduction of gradients, in addition to the bucket."""
    trained, bucket = workload.trained, _bucket(workload)
    match workload.layout.shard:
        case "optimizer":
            # Matrices and vectors are concatenated if both fit in a bucket; all are sent as bf16.
            joined = workload.adapter is None and trained <= REDUCE_BUCKET
            return 2.0 * trained + (4.0 * trained if joined else 0.0)
        case "params":
            return bucket + 2.0 * bucket / workload.layout.group
        case _:
            return bucket


def updating(workload: Workload) -> float:
    """Bytes of fp32 gradients copied by the optimizer step: ZeRO-3 concatenates a sub-group."""
    whole = workload.layout.shard == "params" and workload.layout.offload == "none"
    return 4.0 * min(SUB_GROUP, _share(workload)) if whole else 0.0
