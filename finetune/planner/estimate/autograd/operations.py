"""Count the operations of a step other than matrix products, and the bytes they move."""

import dataclasses

from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.workload import Workload

# Number of operations in transformers' layers, by purpose; PyTorch launches them one by one.
NORM, ROTATION, ATTENTION, UNIT, ADDITION = 6, 8, 3, 2, 1
FUSED_NORM, FUSED_ROTATION = 2, 3
"""Of the same with the kernels of this package on a GPU."""
EXPERTS = 24
ADAPTER, CAST, DROPPED, DORA = 4, 1, 2, 16
HEAD = 24
"""Final norm, head and loss."""


@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations of a step of one process, without matrix products."""

    started: float
    layers: float
    """Bytes read and written by the operations of layers."""
    loss: float
    """Bytes read and written to compute the loss and its gradient from logits."""
    updates: float
    """Bytes read and written by the optimizer."""


def operations(workload: Workload, tokens: float) -> Operations:
    """Operations of a step of one process, and the bytes they move for `tokens` tokens."""
    workload = _on_any_engine(workload)
    passes = 3 + workload.recomputes
    layers, steps = workload.shape.layers, workload.accumulation
    started = steps * (passes * layers * _layer_operations(workload) + 3 * HEAD)
    # What the operations of a layer read and write in its forward pass.
    moved = (v for node in Layer(workload).build()[0].nodes for v in (*node.inputs, *node.outputs))
    layer = sum(value.size for value in moved if not value.leaf) / workload.tokens
    entries = workload.labelled * workload.shape.outputs * 3.0 * 4
    # AdamW reads and writes weights and two moments, and reads the gradient; the norm reads it, and
    # clipping reads and writes it.
    updates = 10.0 * 4 * workload.trained
    return Operations(started, tokens * passes * layers * layer, tokens * entries, updates)


def forward_operations(workload: Workload) -> float:
    """Operations of a forward pass."""
    return workload.shape.layers * _layer_operations(_on_any_engine(workload)) + HEAD


def _on_any_engine(workload: Workload) -> Workload:
    """The workload whose operations are counted; on GPUs the same for every engine."""
    same = workload.cpu or workload.scheme == "fp32"
    return workload if same else dataclasses.replace(workload, scheme="fsdp")


def _layer_operations(workload: Workload) -> float:
    """Operations of a layer's forward pass."""
    shape, adapter = workload.shape, workload.adapter
    norm = FUSED_NORM if workload.fused_norms and not workload.cpu else NORM
    rotation = FUSED_ROTATION if workload.fused_rotations and not workload.cpu else ROTATION
    found = norm * (shape.norms + 2 * shape.qk_norm) + ATTENTION + UNIT + 2 * ADDITION
    found += rotation * (shape.positions == 0) + len(shape.matrices)
    if shape.experts is not None:
        found += EXPERTS
    if adapter is not None:
        each = ADAPTER + CAST * (workload.scheme == "autocast") + DROPPED * adapter.dropout
        found += len(adapter.ranks) * (each + DORA * adapter.dora)
    elif workload.scheme == "autocast":
        found += CAST * len(shape.matrices)
    return float(found)
