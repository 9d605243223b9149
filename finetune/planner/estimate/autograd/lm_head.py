"""Final norm, head and loss: with all logits, or in chunks (`kernels/chunked_loss.py`)."""

import dataclasses

from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.autograd.tape import Tape, Trace, Value, parameter, trace
from finetune.planner.estimate.head_losses import SCORES
from finetune.planner.estimate.workload import Workload
from finetune.planner.kernels import (
    CHUNK_ENTRIES,
    GPU_CHUNK_ENTRIES,
    GPU_TAUGHT_ENTRIES,
    GPU_TILE_ENTRIES,
    TAUGHT_ENTRIES,
    TILE_ENTRIES,
)

TAUGHT = 9
"""Number of fp32 copies of a chunk of logits during a divergence and its gradient: logits of
student and teacher, their log-probabilities, probabilities, and gradients."""
KEPT = 3
"""Number of these that a divergence of all labelled logits keeps for its backward pass."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Trace of the final norm, head and loss."""

    trace: Trace
    entering: float
    """Bytes of the input of the head."""
    projected: float
    """Peak of norm and head before the loss, inside autocast."""
    apart: float
    """Peak of the backward of loss and head, before that of the norm."""


def head(workload: Workload) -> Head:
    """Final norm, head and loss of a workload."""
    shape, builder = workload.shape, Layer(workload)
    source = Value(float(workload.tokens * shape.hidden * workload.residual))
    normed = builder.norm(source)
    of_norm = len(builder.tape.nodes)
    projected = None
    if workload.loss is SCORES:
        result, entering = _scores(workload, builder.tape, normed)
    elif workload.loss.selected:
        result, entering, projected = _labelled(workload, builder, source, normed)
    elif workload.loss.chunked:
        result, entering = _chunked(workload, builder.tape, normed)
    else:
        entering = normed.size
        result, projected = _whole(workload, builder, source, normed)
    found = trace(builder.tape, source, result)
    projected = found.forward if projected is None else projected
    if workload.loss.chunked:
        # Its gradients are computed in the forward pass, and only they are kept from then on.
        found = dataclasses.replace(found, forward=found.saved)
    return Head(found, entering, projected, max(found.backwards[of_norm:]))


def _width(workload: Workload) -> int:
    """Bytes per element of the head's stored weight."""
    copied = workload.adapter is not None and "head" in workload.adapter.saved
    if workload.kbit_prepared or (copied and workload.scheme == "autocast"):
        return 4
    return workload.stored_width


def _weight(workload: Workload, tape: Tape) -> Value:
    """The head's weight as its product reads it: autocast casts another data type."""
    width, entries = _width(workload), workload.shape.embedding
    weight = parameter(float(entries * width), workload.trains("head"))
    if workload.autocast and width != workload.compute:
        weight = tape.run(float(entries * workload.compute), (weight,))
    return weight


def _saved(workload: Workload, given: Value, weight: Value) -> list[Value]:
    """What the product of the head saves: its input for a trained weight, and a cast weight."""
    return ([given] if workload.trains("head") else []) + ([] if weight.leaf else [weight])


def _whole(workload: Workload, builder: Layer, source: Value, normed: Value) -> tuple[Value, float]:
    """All logits and their loss, and the peak before the loss."""
    shape, tape, given = workload.shape, builder.tape, normed
    entries = workload.tokens * shape.vocab
    inner = workload.tokens * shape.hidden * workload.compute
    if workload.autocast and normed.size != inner:
        given = tape.run(inner, (normed,))
    weight = _weight(workload, tape)
    size = entries * workload.compute if workload.loss.logits else 0.0
    logits = tape.run(size, (given, weight), _saved(workload, given, weight))
    if shape.capped_logits:
        logits = builder.capped(logits)
    projected = trace(tape, source, logits).forward
    return _loss(workload, tape, logits, entries), projected


def _labelled(
    workload: Workload, builder: Layer, source: Value, normed: Value
) -> tuple[Value, float, float]:
    """`_whole` with only the hidden states of labelled tokens as input of the head.

    The logits of a head that tensor parallelism splits are gathered: first concatenated, then put
    in the order of the vocabulary. Also returns the bytes of its input.
    """
    shape, tape, compute = workload.shape, builder.tape, workload.compute
    picked = tape.run(normed.size * workload.labelled, (normed,))
    given, held = picked, (normed, picked)
    if workload.autocast and picked.size != workload.labelled_tokens * shape.hidden * compute:
        given = tape.run(picked.size / 2, (picked,), holds=(normed,))
    weight = _weight(workload, tape)
    own = float(workload.labelled_tokens * shape.vocab * compute)
    logits = tape.run(own, (given, weight), _saved(workload, given, weight), holds=held)
    if shape.ways > 1:
        beside = tape.run(own * shape.ways, (logits,))
        logits = tape.run(own * shape.ways, (beside,), holds=(*held, logits))
    projected = trace(tape, source, logits).forward
    entries = float(workload.labelled_tokens * shape.vocab * shape.ways)
    wide = logits if compute == 4 else tape.run(4 * entries, (logits,))
    if shape.capped_logits:
        wide = builder.capped(wide)
    if workload.taught:
        kept = Value(4.0 * entries * KEPT, grad=False)
        within = 4.0 * entries * (TAUGHT - KEPT)
        loss = tape.run(4, (wide,), (kept,), forward=within, backward=within, holds=(wide, *held))
    else:
        shares = tape.run(4 * entries, (wide,), holds=(wide, *held), keeps_result=True)
        loss = tape.run(4, (shares,), holds=(wide, *held))
    return loss, normed.size + picked.size, projected


def _loss(workload: Workload, tape: Tape, logits: Value, entries: int) -> Value:
    loss = workload.loss
    if not loss.logits:
        return tape.run(0, (logits,))
    if loss.exact:
        held = (logits,) if loss.picked else ()
        share = workload.labelled if loss.picked else 1.0
        given = tape.run(logits.size * share, (logits,)) if loss.picked else logits
        exact = 4 * entries * share
        wide = given if given.size == exact else tape.run(exact, (given,), holds=held)
        held = (logits, given, wide) if loss.picked else ()
        shares = tape.run(exact, (wide,), holds=held, keeps_result=True)
        return tape.run(4, (shares,))
    kept = Value(loss.saved * entries, grad=False)
    scratch = max(0.0, loss.backward - loss.saved) * entries - logits.size
    return tape.run(
        4, (logits,), (kept,), forward=(loss.forward - loss.saved) * entries, backward=scratch
    )


def _chunked(workload: Workload, tape: Tape, normed: Value) -> tuple[Value, float]:
    """Head and loss with `kernels.head=chunked`, and the bytes of their input.

    Gradients are computed in the forward pass, so the saved values are gradients: of the labelled
    hidden states and, if it is trained, of the head.
    """
    picked = tape.run(normed.size * workload.labelled, (normed,))
    trained = workload.trains("head")
    weight = parameter(float(workload.shape.embedding * _width(workload)), trained)
    kept = picked.size + (weight.size if trained else 0.0)
    result = tape.run(
        4,
        (picked, weight),
        (Value(kept, grad=False),),
        forward=_most(workload, picked.size, weight.size) - kept,
        backward=-kept,  # the gradients are returned
        holds=(normed,),  # by the caller
    )
    return result, normed.size + picked.size


def _scores(workload: Workload, tape: Tape, normed: Value) -> tuple[Value, float]:
    """A score head, which reads one token per row and computes in fp32."""
    picked = tape.run(4.0 * workload.rows * workload.shape.hidden, (normed,))
    scores = tape.run(4.0 * workload.rows * workload.shape.outputs, (picked,), [picked])
    return scores, normed.size


def _taught(workload: Workload, held: float) -> float:
    """`_most` for a head that is compared with that of a teacher (`kernels/divergence.py`)."""
    shape, compute = workload.shape, float(workload.compute)
    labelled, trained = workload.labelled_tokens, workload.trains("head")
    if workload.teacher_shape is not None:
        held += labelled * workload.teacher_shape.hidden * compute
    at_once = TAUGHT_ENTRIES if workload.cpu else GPU_TAUGHT_ENTRIES
    entries = float(min(labelled, max(1, at_once // shape.vocab)) * shape.vocab)
    chunk = entries * (TAUGHT * 4.0 + compute)
    product = shape.embedding * (compute + 4.0 * workload.cpu) * trained
    return held + max(chunk, product + entries * compute)


def _most(workload: Workload, hidden: float, weight: float) -> float:
    """Peak bytes inside the function: its copies, its gradients, and a chunk.

    Args:
        hidden: bytes of the labelled hidden states.
        weight: bytes of the head's weight.
    """
    shape, compute = workload.shape, float(workload.compute)
    labelled = workload.labelled_tokens
    stream, table = labelled * shape.hidden * compute, shape.embedding * compute
    trained = workload.trains("head")
    # In the compute data type: hidden states and weights if they are stored in another, and the
    # gradient of the hidden states. The gradient of the weight is in fp32.
    held = stream + (stream if hidden != stream else 0.0) + (table if weight != table else 0.0)
    held += 4.0 * shape.embedding * trained
    if workload.taught:
        return _taught(workload, held)
    of_cpu, of_gpu = (CHUNK_ENTRIES, TILE_ENTRIES), (GPU_CHUNK_ENTRIES, GPU_TILE_ENTRIES)
    entries = of_cpu if workload.cpu else of_gpu
    rows = min(labelled, max(1, entries[0] // shape.vocab))
    chunk = rows * shape.vocab * compute
    tile = 4.0 * min(rows, max(1, entries[1] // shape.vocab)) * shape.vocab
    # A tile in fp32, if it is not already, and its softmax; with soft-capping also the slope.
    copies = 2 - (compute == 4) + shape.capped_logits
    if workload.chained:
        copies = 0
    product = table * trained
    if workload.cpu and compute != 4:  # torch 2.13 adds bf16 to fp32 through a copy on CPUs
        product += 4.0 * shape.embedding * trained
    working = max(copies * tile, product)  # a tile is freed before the products are computed
    # Finally each gradient is cast to the data type of its tensor.
    returned = hidden if hidden != stream else 0.0
    returned += weight if trained and weight != 4.0 * shape.embedding else 0.0
    return held + chunk + max(working, returned)
