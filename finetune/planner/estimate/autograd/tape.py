"""A tape of operations with the bytes that each allocates, saves for the backward pass, and frees.

It simulates the memory use of autograd without data: a value lives as long as a later operation
needs it or a node has saved it; the backward pass creates gradients in reverse order, frees the
saved values of a node once it has run, and adds the gradients of a value that was used twice.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of `size` bytes."""

    size: float
    grad: bool = True
    """Whether it needs a gradient."""
    leaf: bool = False
    """Whether it is a parameter: its bytes are not counted here, and its gradient stays."""
    gradient: float = 0.0
    """Bytes of its gradient; 0 for the same as `size`."""

    @property
    def gradient_size(self) -> float:
        return self.gradient or self.size


def parameter(size: float, trained: bool) -> Value:
    """A parameter of `size` bytes."""
    return Value(size, grad=trained, leaf=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    """Values that are saved for the backward pass."""
    forward: float = 0.0
    """Bytes that the operation needs while it runs, in addition to its output."""
    backward: float = 0.0
    """Bytes that its backward operation needs while it runs."""
    passes: bool = False
    """Passes its gradient on without a copy, like an addition."""
    holds: tuple[Value, ...] = ()
    """Values that a caller keeps alive until this operation has run."""

    @property
    def grad(self) -> bool:
        """Whether any output needs a gradient."""
        return any(value.grad for value in self.outputs)


class Tape:
    """Operations in the order of the forward pass."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.marked: int | None = None
        """Index of the first operation after the mark."""

    def mark(self) -> None:
        """Mark the place before the next operation, for `Trace.marked`."""
        self.marked = len(self.nodes)

    def run(
        self,
        size: float,
        inputs: Iterable[Value],
        keeps: Iterable[Value] = (),
        forward: float = 0.0,
        backward: float = 0.0,
        passes: bool = False,
        holds: Iterable[Value] = (),
        keeps_result: bool = False,
    ) -> Value:
        """Record an operation; returns its output, which needs a gradient if an input does."""
        taken = tuple(inputs)
        output = Value(size, any(value.grad for value in taken))
        saved = (*keeps, output) if keeps_result else tuple(keeps)
        self.nodes.append(Node(taken, (output,), saved, forward, backward, passes, tuple(holds)))
        return output

    def halves(self, value: Value) -> tuple[Value, Value]:
        """Two views of a value, whose gradients are tensors of their own until they are joined."""
        views = tuple(Value(0.0, value.grad, gradient=value.size / 2) for _ in range(2))
        self.nodes.append(Node((value,), views))
        return views[0], views[1]

    def run_many(
        self,
        sizes: Iterable[float],
        inputs: Iterable[Value],
        keeps: Iterable[Value],
        forward: float,
        backward: float,
    ) -> tuple[Value, ...]:
        """Record an operation with several outputs; its backward waits for all their gradients."""
        taken = tuple(inputs)
        grad = any(value.grad for value in taken)
        outputs = tuple(Value(size, grad) for size in sizes)
        self.nodes.append(Node(taken, outputs, tuple(keeps), forward, backward))
        return outputs


@dataclasses.dataclass(frozen=True)
class Trace:
    """Memory of running a tape, in bytes on top of what was in use before."""

    saved: float
    """Bytes saved for the backward pass, without the result."""
    forward: float
    """Peak of the forward pass."""
    passing: float
    """Peak of the forward pass if nothing is saved, as in the first run of a checkpoint."""
    backward: float
    """Peak of the backward pass, including saved values and new gradients."""
    gradients: float
    """Bytes of gradients of parameters, which stay."""
    backwards: tuple[float, ...]
    """Peak during the backward of each operation, in the order of the forward pass."""
    marked: float
    """Bytes in use when the backward pass is back at the tape's mark, with the gradients so far."""


class _Memory:
    """Bytes in use, and their peak."""

    def __init__(self) -> None:
        self.live = 0.0
        self.peak = 0.0
        self.marked = 0.0
        self.references: dict[Value, int] = {}

    def hold(self, value: Value) -> None:
        if value.leaf:
            return
        if value not in self.references:
            self.live += value.size
        self.references[value] = self.references.get(value, 0) + 1

    def release(self, value: Value) -> None:
        if value.leaf:
            return
        self.references[value] -= 1
        if not self.references[value]:
            del self.references[value]
            self.live -= value.size

    def note(self, besides: float = 0.0) -> None:
        self.peak = max(self.peak, self.live + besides)


def trace(
    tape: Tape, source: Value, result: Value, source_held: bool = False, accumulated: bool = False
) -> Trace:
    """Run a tape forward and backward, from the gradient of its result to that of its source.

    Args:
        source_held: the source is kept elsewhere (by a checkpoint) and is not counted here.
        accumulated: gradients of parameters are added to earlier ones and freed.
    """
    needed = {node for node in tape.nodes if node.grad}
    passing = _forward(tape, source, result, source_held, set()).peak
    memory = _forward(tape, source, result, source_held, needed)
    forward, memory.peak = memory.peak, 0.0
    memory.release(result)
    saved = memory.live
    peaks = dict.fromkeys(tape.nodes, 0.0)
    gradients = _backward(tape, memory, needed, result, peaks, accumulated)
    backwards = tuple(peaks.values())
    return Trace(saved, forward, passing, memory.peak, gradients, backwards, memory.marked)


def _forward(
    tape: Tape, source: Value, result: Value, source_held: bool, saving: set[Node]
) -> _Memory:
    """Memory after a tape has run forward; only the nodes in `saving` save their values."""
    memory = _Memory()
    last = {value: node for node in tape.nodes for value in node.inputs + node.holds}
    memory.hold(source)
    if source_held:
        memory.live -= source.size
        memory.hold(source)
    for node in tape.nodes:
        for value in node.outputs:
            memory.hold(value)
        if node in saving:
            for value in node.keeps:
                memory.hold(value)
        memory.note(node.forward)
        for value in dict.fromkeys(node.inputs + node.holds):
            if value is not result and last[value] is node:
                memory.release(value)
    return memory


def _backward(
    tape: Tape,
    memory: _Memory,
    needed: set[Node],
    result: Value,
    peaks: dict[Node, float],
    accumulated: bool,
) -> float:
    """Run the tape in reverse on `memory`; returns the bytes of the gradients of parameters.

    The peak during each operation is written to `peaks`.
    """
    grads: dict[Value, Value] = {result: Value(result.gradient_size)}
    memory.hold(grads[result])
    memory.note()
    gradients = 0.0
    for at, node in reversed(list(enumerate(tape.nodes))):
        if at + 1 == tape.marked:
            memory.marked = memory.live
        given = [grads.pop(value) for value in node.outputs if value in grads]
        if not given or node not in needed:
            continue
        made: list[tuple[Value, Value]] = []
        for value in node.inputs:
            if not value.grad:
                continue
            new = given[0] if node.passes else Value(value.gradient_size)
            memory.hold(new)
            made.append((value, new))
        memory.note(node.backward)
        peaks[node] = memory.live + node.backward
        for value in node.keeps:
            memory.release(value)
        for gradient in given:
            memory.release(gradient)
        for value, new in made:
            if value.leaf:
                gradients += value.gradient_size  # stays alive: never released
                if accumulated:
                    memory.release(new)
                continue
            old = grads.get(value)
            if old is None:
                grads[value] = new
                continue
            total = Value(value.gradient_size)
            memory.hold(total)
            memory.note()
            memory.release(old)
            memory.release(new)
            grads[value] = total
    return gradients
