"""Final norm, head and loss: with all logits, or in chunks (`kernels/chunked_loss.py`)."""

import dataclasses

from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.autograd.tape import Tape, Trace, Value, trace
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
    if workload.shape.scores:
        return _scores(workload)
    if workload.loss.selected:
        return _labelled(workload)
    return _chunked(workload) if workload.loss.chunked else _whole(workload)


def _width(workload: Workload) -> int:
    """Bytes per element of the head's stored weight."""
    copied = workload.adapter is not None and "head" in workload.adapter.saved
    if workload.kbit_prepared or (copied and workload.scheme == "autocast"):
        return 4
    return workload.stored_width


def _whole(workload: Workload) -> Head:
    shape, builder = workload.shape, Layer(workload)
    tape: Tape = builder.tape
    source = Value(workload.tokens * shape.hidden * workload.residual)
    normed = builder.norm(source)
    of_norm = len(tape.nodes)
    width, trained = _width(workload), workload.trains("head")
    weight = Value(shape.embedding * width, grad=trained, leaf=True)
    given, entries = normed, workload.tokens * shape.vocab
    inner = workload.tokens * shape.hidden * workload.compute
    if workload.autocast and normed.size != inner:
        given = tape.run(inner, (normed,))
    if workload.autocast and width != workload.compute:
        weight = tape.run(shape.embedding * workload.compute, (weight,))
    keeps = ([given] if trained else []) + ([] if weight.leaf else [weight])
    loss = workload.loss
    size = entries * workload.compute if loss.logits else 0.0
    logits = tape.run(size, (given, weight), keeps)
    if shape.capped_logits:
        logits = builder.capped(logits)
    projected = trace(tape, source, logits).forward
    found = trace(tape, source, _loss(workload, tape, logits, entries))
    return Head(found, normed.size, projected, max(found.backwards[of_norm:]))


def _labelled(workload: Workload) -> Head:
    """`_whole` with only the hidden states of labelled tokens as input of the head.

    The logits of a head that tensor parallelism splits are gathered: first concatenated, then put
    in the order of the vocabulary.
    """
    shape, builder = workload.shape, Layer(workload)
    tape = builder.tape
    source = Value(float(workload.tokens * shape.hidden * workload.residual))
    normed = builder.norm(source)
    of_norm = len(tape.nodes)
    picked = tape.run(normed.size * workload.labelled, (normed,))
    width, trained = _width(workload), workload.trains("head")
    weight = Value(float(shape.embedding * width), grad=trained, leaf=True)
    given, compute = picked, workload.compute
    if workload.autocast and picked.size != workload.labelled_tokens * shape.hidden * compute:
        given = tape.run(picked.size / 2, (picked,), holds=(normed,))
    if workload.autocast and width != compute:
        weight = tape.run(float(shape.embedding * compute), (weight,))
    keeps = ([given] if trained else []) + ([] if weight.leaf else [weight])
    own = float(workload.labelled_tokens * shape.vocab * compute)
    logits = tape.run(own, (given, weight), keeps, holds=(normed, picked))
    held = (normed, picked)
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
        shares = tape.run(4 * entries, (wide,), holds=(wide, *held))
        tape.nodes[-1] = dataclasses.replace(tape.nodes[-1], keeps=(shares,))
        loss = tape.run(4, (shares,), holds=(wide, *held))
    found = trace(tape, source, loss)
    return Head(found, normed.size + picked.size, projected, max(found.backwards[of_norm:]))


def _loss(workload: Workload, tape: Tape, logits: Value, entries: int) -> Value:
    loss = workload.loss
    if not loss.logits:
        return tape.run(0, (logits,))
    if loss.exact:
        held = (logits,) if loss.picked else ()
        given = tape.run(logits.size, (logits,)) if loss.picked else logits
        wide = given if given.size == 4 * entries else tape.run(4 * entries, (given,), holds=held)
        held = (logits, wide) if loss.picked else ()
        shares = tape.run(4 * entries, (wide,), holds=held)
        last = tape.nodes[-1]
        tape.nodes[-1] = dataclasses.replace(last, keeps=(shares,))
        return tape.run(4, (shares,))
    kept = Value(loss.saved * entries, grad=False)
    scratch = max(0.0, loss.backward - loss.saved) * entries - logits.size
    return tape.run(
        4, (logits,), (kept,), forward=(loss.forward - loss.saved) * entries, backward=scratch
    )


def _chunked(workload: Workload) -> Head:
    """Norm, head and loss with `kernels.head=chunked`.

    Gradients are computed in the forward pass, so the saved values are gradients: of the labelled
    hidden states and, if it is trained, of the head. `forward` of the returned trace is the memory
    in use once the loss is computed.
    """
    shape, builder = workload.shape, Layer(workload)
    tape, stream = builder.tape, float(workload.tokens * shape.hidden)
    source = Value(stream * workload.residual)
    normed = builder.norm(source)
    of_norm = len(tape.nodes)
    picked = tape.run(normed.size * workload.labelled, (normed,))
    trained = workload.trains("head")
    weight = Value(float(shape.embedding * _width(workload)), grad=trained, leaf=True)
    kept = picked.size + (weight.size if trained else 0.0)
    tape.run(
        4,
        (picked, weight),
        (Value(kept, grad=False),),
        forward=_most(workload, picked.size, weight.size) - kept,
        backward=-kept,  # the gradients are returned
        holds=(normed,),  # by the caller
    )
    found = trace(tape, source, tape.nodes[-1].outputs[0])
    entering = normed.size + picked.size
    waiting = dataclasses.replace(found, forward=found.saved)
    return Head(waiting, entering, found.forward, max(found.backwards[of_norm:]))


def _scores(workload: Workload) -> Head:
    """Final norm and a score head, which reads one token per row and computes in fp32."""
    shape, builder = workload.shape, Layer(workload)
    tape = builder.tape
    source = Value(float(workload.tokens * shape.hidden * workload.residual))
    normed = builder.norm(source)
    of_norm = len(tape.nodes)
    picked = tape.run(4.0 * workload.rows * shape.hidden, (normed,))
    scores = tape.run(4.0 * workload.rows * shape.scores, (picked,), [picked])
    found = trace(tape, source, scores)
    return Head(found, normed.size, found.forward, max(found.backwards[of_norm:]))


def _taught(workload: Workload, hidden: float, weight: float) -> float:
    """`_most` for a head that is compared with that of a teacher (`kernels/divergence.py`)."""
    shape, compute = workload.shape, float(workload.compute)
    labelled = workload.labelled_tokens
    stream, table = labelled * shape.hidden * compute, shape.embedding * compute
    trained = workload.trains("head")
    held = stream + (stream if hidden != stream else 0.0) + (table if weight != table else 0.0)
    held += 4.0 * shape.embedding * trained
    if workload.teacher_shape is not None:
        held += labelled * workload.teacher_shape.hidden * compute
    at_once = TAUGHT_ENTRIES if workload.cpu else GPU_TAUGHT_ENTRIES
    entries = float(min(labelled, max(1, at_once // shape.vocab)) * shape.vocab)
    chunk = entries * (TAUGHT * 4.0 + compute)
    product = (table + 4.0 * shape.embedding * workload.cpu) * trained
    return held + max(chunk, product + entries * compute)


def _most(workload: Workload, hidden: float, weight: float) -> float:
    """Peak bytes inside the function: its copies, its gradients, and a chunk.

    Args:
        hidden: bytes of the labelled hidden states.
        weight: bytes of the head's weight.
    """
    if workload.taught:
        return _taught(workload, hidden, weight)
    shape, compute = workload.shape, float(workload.compute)
    labelled = workload.labelled_tokens
    stream, table = labelled * shape.hidden * compute, shape.embedding * compute
    trained = workload.trains("head")
    # In the compute data type: hidden states and weights if they are stored in another, and the
    # gradient of the hidden states. The gradient of the weight is in fp32.
    held = stream + (stream if hidden != stream else 0.0) + (table if weight != table else 0.0)
    held += 4.0 * shape.embedding * trained
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
