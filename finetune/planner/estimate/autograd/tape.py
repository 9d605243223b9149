"""A tape of operations with the bytes that each makes, keeps for the backward pass, and frees.

It repeats what autograd does to memory, without numbers in the tensors: a value lives while a later
operation needs it or a node has saved it; the backward pass makes gradients in reverse order, frees
what a node had saved once it has run, and adds gradients of a value that was used twice.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of so many bytes."""

    size: float
    grad: bool = True
    """Whether a gradient flows to it."""
    leaf: bool = False
    """A parameter: its bytes are not counted here, and its gradient stays."""
    gradient: float = 0.0
    """Bytes of its gradient; those of the value where this is 0."""

    @property
    def gradient_size(self) -> float:
        return self.gradient or self.size


def parameter(size: float, trained: bool) -> Value:
    """Weights of so many bytes."""
    return Value(size, grad=trained, leaf=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    """Values that are saved for the backward pass."""
    forward: float = 0.0
    """Bytes that the operation needs besides its output while it runs."""
    backward: float = 0.0
    """The same for its backward."""
    passes: bool = False
    """Hands its gradient on without a copy, as an addition does."""
    holds: tuple[Value, ...] = ()
    """Values that a caller holds until this operation has run."""

    @property
    def grad(self) -> bool:
        """Whether a gradient flows through it."""
        return any(value.grad for value in self.outputs)


class Tape:
    """Operations in the order in which the forward pass runs them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def run(
        self,
        size: float,
        inputs: Iterable[Value],
        keeps: Iterable[Value] = (),
        forward: float = 0.0,
        backward: float = 0.0,
        passes: bool = False,
        holds: Iterable[Value] = (),
    ) -> Value:
        """Record an operation; returns its output, which has a gradient if an input has one."""
        taken = tuple(inputs)
        output = Value(size, any(value.grad for value in taken))
        node = Node(taken, (output,), tuple(keeps), forward, backward, passes, tuple(holds))
        self.nodes.append(node)
        return output

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
    """What running a tape does to memory, in bytes over what was there before."""

    saved: float
    """Held after the forward pass for the backward pass, the result not counted."""
    forward: float
    """Most that the forward pass holds at once."""
    passing: float
    """The same where nothing is saved: a checkpoint's first run."""
    backward: float
    """Most that the backward pass holds at once, saved values and new gradients counted."""
    gradients: float
    """Gradients of parameters that stay."""
    backwards: tuple[float, ...]
    """The most while each operation runs backwards, in the order of the forward pass."""


class _Memory:
    """Bytes that are alive, and the most that ever were."""

    def __init__(self) -> None:
        self.live = 0.0
        self.peak = 0.0
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
    """Run a tape forwards and backwards, from the gradient of its result to that of its source.

    Args:
        source_held: somebody else keeps the source (a checkpoint does): it is not counted here.
        accumulated: gradients of parameters are added to earlier ones, and gone.
    """
    needed = {node for node in tape.nodes if node.grad}
    passing = _forward(tape, source, result, source_held, set()).peak
    memory = _forward(tape, source, result, source_held, needed)
    forward, memory.peak = memory.peak, 0.0
    memory.release(result)
    saved = memory.live
    peaks = dict.fromkeys(tape.nodes, 0.0)
    gradients = _backward(tape, memory, needed, result, peaks, accumulated)
    return Trace(saved, forward, passing, memory.peak, gradients, tuple(peaks.values()))


def _forward(
    tape: Tape, source: Value, result: Value, source_held: bool, saving: set[Node]
) -> _Memory:
    """Memory once a tape has run forwards; the nodes of `saving` keep what they keep."""
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
    """Run the tape in reverse on `memory`; returns the bytes of parameters' gradients.

    `peaks` is given the most that each operation holds.
    """
    grads: dict[Value, Value] = {result: Value(result.gradient_size)}
    memory.hold(grads[result])
    memory.note()
    gradients = 0.0
    for node in reversed(tape.nodes):
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
