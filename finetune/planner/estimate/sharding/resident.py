"""Memory that is resident between steps, on the device and on the host."""

from finetune.planner.estimate.sharding import deepspeed, nvme
from finetune.planner.estimate.sharding.deepspeed import REDUCE_BUCKET
from finetune.planner.estimate.workload import Workload
from finetune.planner.kernels import SCORE_BLOCK


def state(workload: Workload) -> dict[str, float]:
    """Bytes that stay on one process's device from step to step, by component."""
    layout, trained = workload.layout, workload.trained
    shards = layout.share("params")
    held = 4 if workload.scheme == "fsdp" else workload.trained_width
    parts: dict[str, float] = {}
    # Without an accelerator what is offloaded stays in the memory that is counted.
    on_host = layout.offload == "all" and not workload.cpu
    scales = workload.scale_bytes
    weights = (workload.frozen_bytes - scales) / shards
    mine = (workload.sharded if shards > 1 else trained) * held / shards
    if workload.adapter is None:
        parts["weights"] = 0.0 if on_host else mine
    else:
        parts["weights"] = scales + (0.0 if on_host else weights)
        parts["adapters"] = 0.0 if on_host else mine
    moments = workload.moments * workload.sharded / layout.share("optimizer")
    elsewhere = layout.offload != "none" or workload.paged
    parts["optimizer"] = 0.0 if elsewhere and not workload.cpu else moments
    parts["buckets"] = _buckets(workload)
    if layout.device == "nvme" and workload.cpu:  # the host's memory is what is counted
        parts["weights"], parts["adapters"] = nvme.weights(workload), 0.0
        parts["optimizer"] = nvme.states(workload)
        parts["buckets"] += nvme.buffers(workload)
    parts["inputs"] = _inputs(workload)
    if workload.teacher_shape is not None:
        parts["teacher"] = workload.teacher_bytes
    if workload.reference_stays:
        parts["reference"] = workload.reference_bytes
    return parts


def _buckets(workload: Workload) -> float:
    """Copies of gradients that are being reduced."""
    layout, trained = workload.layout, workload.trained
    if layout.traits.copies_gradients and layout.processes > 1:
        return trained * float(workload.trained_width)  # DDP's buckets: gradients are copied in
    if deepspeed.accumulates(workload):
        return deepspeed.standing_bucket(workload)
    if layout.traits.masters and layout.shard != "optimizer":
        return 2.0 * min(REDUCE_BUCKET, trained) * workload.compute
    return 0.0


def _inputs(workload: Workload) -> float:
    """Ids, positions and rotary tables, and the causal mask where one is made.

    Attention by products makes that of a block of queries once, for the heads that share a key.
    """
    tables = 2.0 * workload.length * workload.shape.head_dim * workload.compute
    # A mask is expanded to all rows; only checkpoints keep it, layers keep copies of their own.
    masked = workload.attention != "flash" and workload.checkpointing == "full"
    mask = workload.rows * workload.length**2 if masked else 0
    if workload.scores:
        groups = workload.shape.heads // workload.shape.kv_heads
        mask += groups * SCORE_BLOCK**2 * workload.compute
    return 8.0 * workload.tokens + 8.0 * workload.length + tables + mask


def loading(workload: Workload) -> dict[str, float]:
    """Bytes on one process's GPU while it loads, where that is more than it keeps of the weights.

    Of a quantised model ZeRO-3 partitions nothing before all of it is there (transformers 5.23
    calls `zero.Init` only without a quantiser), and the largest matrix besides in 16 bits. FSDP
    cuts it in host memory.
    """
    if workload.quantization == "none" or not workload.layout.for_own_module or workload.cpu:
        return {}
    largest = max([workload.shape.embedding, *(m.weights for m in workload.shape.matrices)])
    return {"weights": workload.frozen_bytes, "casts": 2.0 * largest}


def loading_on_host(workload: Workload) -> float:
    """Bytes of host memory per process while it loads, besides pages of files that are mapped.

    Weights in the type of their file are mapped, and ZeRO-3 partitions them one by one; FSDP makes
    fp32 of its shards. A copy is made of weights that are trained whole in fp32, and of quantised
    ones that FSDP will cut.
    """
    traits = workload.layout.traits
    if workload.quantization != "none":
        return workload.frozen_bytes if traits.shards_all else 0.0
    whole = workload.adapter is None and not traits.masters and not traits.shards_all
    return 4.0 * workload.shape.parameters if whole else 0.0


def host(workload: Workload) -> float:
    """Bytes of host memory per process, while the model is loaded or in training."""
    if workload.cpu:  # where weights lie in training
        return offloaded(workload)
    return max(loading_on_host(workload), offloaded(workload))


def offloaded(workload: Workload) -> float:
    """Bytes of host memory per process that offload needs.

    What blocks keep for the backward pass, where it waits there, and paged moments, which move
    there when the GPU is full (bitsandbytes has them from cudaMallocManaged, which PyTorch's count
    of the device leaves out); besides that, of offloaded states:
    FSDP holds fp32 weights, gradients and moments there: 16 a parameter. DeepSpeed holds 18 with
    the optimizer alone or the parameters too, times 1.5 for buffers (its own estimator's factor).
    """
    layout = workload.layout
    waiting = workload.waiting_activations
    if workload.paged and not workload.cpu:
        waiting += workload.moments * workload.sharded / layout.share("optimizer")
    if layout.offload == "none":
        return waiting
    if layout.device == "nvme":
        return waiting + nvme.host(workload)
    trained, group = workload.trained, layout.group
    frozen = 0.0
    if layout.offload == "all":
        frozen = (workload.frozen_bytes - workload.scale_bytes) / group
    each, buffers = layout.traits.host_elements[layout.offload], layout.traits.host_buffers
    return waiting + (each * trained / group + frozen) * buffers
