"""Memory of ring attention in one layer (`distributed.ring`)."""

from finetune.planner.estimate.autograd.tape import Tape, Value
from finetune.planner.estimate.workload import Workload


def ring_attention(
    tape: Tape, workload: Workload, query: Value, key: Value, values: Value
) -> Value:
    """Record ring attention on the last process, all tokens of which are of an earlier document.

    The forward pass holds the keys and values that it computes with, those that arrive next, one
    partial result, and the sum of results in fp32 if they are narrower. The backward pass also
    holds gradients of one part, and fp32 gradients of keys and values: those that arrived, and from
    the second part on those that are still being sent.

    Args:
        tape: Tape of the layer.
        workload: Workload of the process.
        query: (tokens, heads, head size).
        key: (tokens, key heads, head size).
        values: Like `key`.
    """
    shape, tokens = workload.shape, workload.tokens
    width, ways = workload.compute, workload.layout.axes.ring
    mixed = float(tokens * shape.query * width)
    both = key.size + float(tokens * shape.key * width)
    own = tape.run(both, (key, values), passes=True)
    logs = Value(4.0 * tokens * shape.heads, grad=False)
    wide = 0.0 if width == 4 else 4 * mixed / width
    exact = 4 * both / width
    forward = both * min(ways - 1, 2) + mixed + wide
    part = mixed + both  # gradients of one part
    if ways == 2:
        backward = wide + both + max(part + exact, 2 * exact)
    else:
        backward = wide + both * min(ways - 2, 2) + part + 2 * exact
    inputs, keeps = (query, own), (query, own, logs)
    return tape.run(mixed, inputs, keeps, forward, backward, holds=(key, values), keeps_result=True)
