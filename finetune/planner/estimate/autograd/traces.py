"""Trace a layer and the head of a workload, each once on a tape."""

import dataclasses

from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.autograd.lm_head import Head, head
from finetune.planner.estimate.autograd.tape import Trace, trace
from finetune.planner.estimate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Traces:
    """The traces of a layer and of the head of a workload."""

    layer: Trace
    kept: float
    """Bytes that each layer keeps from the forward to the backward pass."""
    first: float
    """Bytes that the first layer keeps, which is less if its input needs no gradient."""
    head: Head
    skipped: int = 0
    """Number of first layers that no gradient enters, which keep nothing."""

    def kept_by(self, layers: int) -> float:
        """Bytes that the first `layers` layers keep for the backward pass."""
        layers -= self.skipped
        return (layers - 1) * self.kept + self.first if layers > 0 else 0.0


def traces(workload: Workload) -> Traces:
    held = workload.recomputes
    layer = _layer_trace(workload, held, enters=True)
    # Frozen embeddings have no gradient, but checkpointing requires one for its input.
    enters = workload.adapter is None or held
    first = layer if enters else _layer_trace(workload, held, enters=False)
    stream = float(workload.tokens * workload.shape.hidden * workload.residual)
    kept, least = (stream, stream) if held else (layer.saved, first.saved)
    if workload.checkpointing == "attention":
        # Attention's output in the compute data type, and one fp32 statistic per head.
        shape = workload.shape
        of_token = float(shape.query * workload.compute + 4 * shape.heads)
        kept, least = (each + workload.tokens * of_token for each in (kept, least))
    if workload.checkpointing == "selective":
        kept = least = Layer(workload).kept_selectively()
    if workload.activations_on_host and not workload.cpu:
        kept = least = 0.0
    share = None if workload.adapter is not None else workload.share
    skipped = 0 if share is None else share.skipped
    return Traces(layer, kept, least, head(workload), skipped)


def _layer_trace(workload: Workload, held: bool, enters: bool) -> Trace:
    tape, source, result = Layer(workload).build(enters)
    return trace(tape, source, result, source_held=held)
