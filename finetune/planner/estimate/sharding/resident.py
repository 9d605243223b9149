"""Memory that stays allocated between steps, on the device and on the host."""

from finetune.planner.estimate.sharding.nvme import Swapped
from finetune.planner.estimate.sharding.zero import REDUCE_BUCKET, Gradients
from finetune.planner.estimate.workload import Workload
from finetune.planner.kernels import SCORE_BLOCK


def state(workload: Workload) -> dict[str, float]:
    """Bytes that stay on one process's device from step to step, by component."""
    layout, trained = workload.layout, workload.trained
    shards = layout.share("params")
    held = 4 if workload.scheme == "fsdp" else workload.trained_width
    parts: dict[str, float] = {}
    # Without an accelerator, offloaded state stays in the memory that is counted.
    on_host = layout.offload == "all" and not workload.cpu
    scales = workload.scale_bytes
    weights = (workload.frozen_bytes - scales) / shards
    mine = (workload.sharded if shards > 1 else trained) * held / shards
    if workload.adapter is None:
        parts["weights"] = 0.0 if on_host else mine + weights
    else:
        parts["weights"] = scales + (0.0 if on_host else weights)
        parts["adapters"] = 0.0 if on_host else mine
    moments = workload.moments * workload.sharded / layout.share("optimizer")
    elsewhere = layout.offload != "none" or workload.paged
    parts["optimizer"] = 0.0 if elsewhere and not workload.cpu else moments
    parts["buckets"] = _buckets(workload)
    if layout.device == "nvme" and workload.cpu:  # host memory is counted
        swapped = Swapped(workload)
        parts["weights"], parts["adapters"] = swapped.weights, 0.0
        parts["optimizer"] = swapped.states
        parts["buckets"] += swapped.buffers
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
        return trained * float(workload.trained_width)  # DDP copies gradients into buckets
    gradients = Gradients(workload)
    if gradients.accumulates:
        return gradients.resident_bucket
    if layout.traits.masters and layout.shard != "optimizer":
        return 2.0 * min(REDUCE_BUCKET, trained) * workload.compute
    return 0.0


def _inputs(workload: Workload) -> float:
    """Bytes of ids, positions and rotary tables, and of the causal mask if there is one.

    Attention by matrix products builds the mask of a block of queries once for all heads that share
    a key.
    """
    tables = 2.0 * workload.length * workload.shape.head_dim * workload.compute
    # A mask is expanded to all rows; only checkpoints keep it, since layers keep their own copies.
    masked = workload.attention != "flash" and workload.checkpointing == "full"
    mask = workload.rows * workload.length**2 if masked else 0
    if workload.scored:
        groups = workload.shape.heads // workload.shape.kv_heads
        mask += groups * SCORE_BLOCK**2 * workload.compute
    return 8.0 * workload.tokens + 8.0 * workload.length + tables + mask


def loading(workload: Workload) -> dict[str, float]:
    """Bytes on one process's GPU while loading, if that is more than the weights it keeps.

    ZeRO-3 partitions a quantized model only after all of it is loaded (transformers 5.23 calls
    `zero.Init` only without a quantizer), and the largest matrix also exists in 16 bits. FSDP
    shards it in host memory.
    """
    if workload.quantization == "none" or not workload.layout.for_own_module or workload.cpu:
        return {}
    largest = max([workload.shape.embedding, *(m.weights for m in workload.shape.matrices)])
    return {"weights": workload.frozen_bytes, "casts": 2.0 * largest}


def loading_on_host(workload: Workload) -> float:
    """Bytes of host memory per process while loading, without pages of mapped files.

    Weights in the data type of their file are mapped; ZeRO-3 partitions them one by one, and FSDP
    casts only its shards to fp32. Weights trained in fp32 without sharding are copied, and so are
    quantized weights that FSDP will shard.
    """
    traits = workload.layout.traits
    if workload.quantization != "none":
        return workload.frozen_bytes if traits.shards_all else 0.0
    whole = workload.adapter is None and not traits.masters and not traits.shards_all
    return 4.0 * workload.shape.parameters if whole else 0.0


def host(workload: Workload) -> tuple[float, float]:
    """Bytes of host memory per process while loading, and then while training."""
    if workload.cpu:  # weights and copies are counted in training
        return 0.0, offloaded(workload)
    return loading_on_host(workload), offloaded(workload) + copied(workload)


def copied(workload: Workload) -> float:
    """Bytes of host memory per process for the copy from which checkpoints are written.

    It has fp32 weights and moments. Processes with equal state copy a share each, except in a mesh,
    where this is an upper bound.
    """
    layout = workload.layout
    each = workload.moments + (0.0 if workload.scheme == "deepspeed" else 4.0)
    return each * workload.sharded / (layout.group if layout.axes.any else layout.processes)


def paged(workload: Workload) -> float:
    """Bytes of moments per process that move to the host when the GPU is full.

    bitsandbytes allocates them with cudaMallocManaged, which PyTorch's statistics do not include.
    """
    if not workload.paged or workload.cpu:
        return 0.0
    return workload.moments * workload.sharded / workload.layout.share("optimizer")


def offloaded(workload: Workload) -> float:
    """Bytes of host memory per process for offloading.

    These are activations that blocks keep on the host for the backward pass, paged moments, and
    offloaded states. Per parameter, FSDP holds 16
    bytes (fp32 weights, gradients and moments), DeepSpeed 16 with only the optimizer offloaded and
    18 with the parameters too, times 1.5 for buffers (the factor of its own estimator).
    """
    layout = workload.layout
    waiting = workload.waiting_activations + paged(workload)
    if layout.offload == "none":
        return waiting
    if layout.device == "nvme":
        return waiting + Swapped(workload).host
    trained, group = workload.trained, layout.group
    frozen = 0.0
    if layout.offload == "all":
        frozen = (workload.frozen_bytes - workload.scale_bytes) / group
    each, buffers = layout.traits.host_elements[layout.offload], layout.traits.host_buffers
    return waiting + (each * trained / group + frozen) * buffers


def cast_weights(workload: Workload) -> int:
    """Weights of layers that autocast casts: those that are trained, except by `kernels.lora`."""
    adapter = workload.adapter
    if adapter is None:
        return workload.shape.layers * workload.shape.linear_weights
    return 0 if workload.groups_adapters else adapter.parameters - adapter.whole
