"""Predict the memory of a pipeline stage by walking through its tasks in order.

The model follows torch 2.13: buffers for the hidden states and gradients of all micro-batches exist
from the first task to the last; the output of a forward pass is kept until its backward pass (on a
stage with several parts, until the end of the step); FSDP2 keeps its units gathered and gradients
unsharded until the last backward pass.
"""

from finetune.planner import schedules
from finetune.planner.estimate import stage_workload
from finetune.planner.estimate.autograd.layer import Layer
from finetune.planner.estimate.autograd.tape import trace
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.moments import Moment, Timeline
from finetune.planner.estimate.sharding.resident import cast_weights, state
from finetune.planner.estimate.workload import Workload
from finetune.planner.schedules import Task


def timeline(workload: Workload) -> Timeline:
    """The largest moment of each kind in a step of the stage `workload.layout.stage`."""
    return _Stage(workload).timeline()


class _Stage:
    """The sizes of one stage, and the memory in use while its tasks run."""

    def __init__(self, workload: Workload) -> None:
        layout, axes = workload.layout, workload.layout.axes
        spans = schedules.spans(workload.shape.layers, axes)
        self.parts = {n: len(spans[n]) for n in schedules.parts_of(layout.stage, axes)}
        self.first, self.last = 0, len(spans) - 1
        # With more micro-batches, the stage only repeats itself.
        count = workload.accumulation
        if axes.schedule != "GPipe":
            count = min(count, 2 * axes.pipeline * axes.chunks)
        self.tasks = schedules.order(layout.stage, axes, count)
        self.workload = here = stage_workload.here(workload)
        self.tied = workload.tied
        self.run = traces(here)
        tape, source, result = Layer(here).build()
        self.again = trace(tape, source, result, here.recomputes, accumulated=True)
        self.stream = float(here.tokens * here.shape.hidden * here.residual)
        self.sharded = layout.group > 1
        self.flight: dict[tuple[int, int], float] = {}
        self.sent = 0.0
        """Bytes that were sent and are not freed yet: of one micro-batch, or with several parts of
        all."""
        self.made: set[int] = set()
        """Parts that have gradients."""
        self.open: dict[int, int] = dict.fromkeys(self.parts, 0)
        """Number of layers of each part whose weights are gathered."""
        self.moments: dict[str, Moment] = {}
        self.largest: dict[str, float] = {}
        # Receive buffers for all micro-batches, from the previous and next stages.
        received = [n > 0 and n - 1 not in self.parts for n in self.parts]
        received += [n < self.last and n + 1 not in self.parts for n in self.parts]
        self.base = {**state(here), "hand-overs": 0.0, "casts": 0.0}
        self.base["hand-overs"] = sum(received) * here.accumulation * self.stream
        if here.autocast and here.recomputes:
            # Weights in 16 bits, which autocast keeps until the last micro-batch has passed.
            head = here.shape.head_weights * (self.last in self.parts and here.adapter is None)
            self.base["casts"] = 2.0 * (cast_weights(here) + head)
        if here.teacher_shape is not None and self.last in self.parts:
            # The teacher's hidden states of all micro-batches.
            states = float(here.tokens * here.teacher_shape.hidden * here.compute)
            self.base["teacher"] += workload.accumulation * states
        self._sizes()

    def _sizes(self) -> None:
        here, shape = self.workload, self.workload.shape
        width = float(here.reduce_width if self.sharded else here.gradient_width)
        adapter = here.adapter
        if adapter is None:
            self.layer_gradient = here.trained_inner / max(1, shape.layers) * width
            self.layer_gradient *= shape.layer_parameters / shape.held_layer
        else:
            inside = (adapter.parameters - adapter.whole) / max(1, shape.layers)
            self.layer_gradient = inside * width
        # The gradient of a table that tensor parallelism splits is not divided until it is reduced,
        # or summed with that of the other end. FSDP2 accumulates in fp32 what it keeps of it.
        self.ways = 1 if self.sharded and self.workload.compute != 4 else shape.ways
        self.table = shape.embedding * self.ways * width if here.trains("embedding") else 0.0
        self.head_gradient = shape.head_weights * width if here.trains("head") else 0.0

    # Memory in use -------------------------------------------------------------------------------

    def _gradients(self) -> float:
        found = 0.0
        for number in self.made:
            found += self.parts[number] * self.layer_gradient
            found += self.table * (number == self.first)
            found += self.head_gradient * (number == self.last)
        return found

    def _units(self) -> float:
        """Bytes of gathered weights: the layers reached so far, and weights outside layers."""
        if not self.sharded:
            return 0.0
        return sum(self.open.values()) * self.workload.unit_bytes + self.workload.outer_bytes

    def _note(self, name: str, **parts: float) -> None:
        kept = sum(self.flight.values())
        parts["activations"] = parts.get("activations", 0.0) + kept
        parts["gradients"] = self._gradients() + parts.get("gradients", 0.0)
        parts["units"] = self._units() + parts.get("units", 0.0)
        parts["hand-overs"] = self.base["hand-overs"] + self.sent
        total, known = sum(parts.values()), self.largest.get(name, -1.0)
        if total > known:
            self.largest[name] = total
            self.moments[name] = Moment(name, {**self.base, **parts})

    # Tasks ---------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        for task in self.tasks:
            {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}[
                task.kind
            ](task)
        if self.sharded:
            # Layers are reduced and freed one by one after the last backward pass.
            self._note("gradients reduced", reduction=self.layer_gradient)
        self.open = dict.fromkeys(self.parts, 0)
        cut = self.sharded or self.tied
        self.table = self.table / self.ways if cut else self.table
        last = self._gradients() / self.workload.layout.share("grads")
        self.made.clear()
        base = self.base | {"casts": 0.0, "hand-overs": 0.0}  # freed with the schedule of the step
        self.moments["optimizer step"] = Moment("optimizer step", {**base, "gradients": last})
        return Timeline(tuple(self.moments.values()))

    def _forward(self, task: Task) -> None:
        layers, run = self.parts[task.part], self.run
        inside = run.layer.passing if self.workload.recomputes else run.layer.forward
        received = self.stream if task.part > self.first else 0.0
        unit = self.workload.unit_bytes if self.sharded else 0.0
        self.open[task.part] = 0
        kept = self.run.kept_by(layers - 1) + inside + self.stream - received
        self._note("forward: last layer", activations=kept, units=2 * unit)
        flight = self.run.kept_by(layers) - received
        if task.part == self.last:
            head = run.head
            self._note("forward: head", activations=flight, loss=max(head.entering, head.projected))
            self._note("forward: loss", activations=flight, loss=head.trace.forward)
            flight += head.trace.saved
        else:
            flight += self.stream
        self.flight[task.part, task.micro] = flight

    def _backward(self, task: Task) -> None:
        layers, run = self.parts[task.part], self.run
        again = task.part in self.made
        del self.flight[task.part, task.micro]
        received = self.stream if task.part > self.first else 0.0
        output = self.stream if task.part != self.last else 0.0
        if task.part == self.last:
            self._note(
                "backward: loss and head",
                activations=self.run.kept_by(layers) - received,
                loss=run.head.trace.backward + self.head_gradient * (again and not self.sharded),
            )
        for index in range(layers):
            self.open[task.part] = max(self.open[task.part], index + 1)
            below = self.run.kept_by(layers - index - (0 if self.workload.recomputes else 1))
            layer = self.again if again else run.layer
            transient = layer.backward
            if self.workload.recomputes:
                transient = max(transient, layer.forward + self.stream)
            early = 0.0
            if not again:
                early = index * self.layer_gradient + self.head_gradient * (task.part == self.last)
            name = "backward: first layer" if index == layers - 1 else "backward: a layer"
            # The next unit is prefetched if it is not gathered yet.
            ahead = self.sharded and index + 1 < layers and self.open[task.part] < index + 2
            self._note(
                name,
                units=self.workload.unit_bytes * ahead,
                activations=below + transient + output - (received if index < layers - 1 else 0.0),
                gradients=early,
            )
        if task.part == self.first and self.table:
            early = 0.0 if again else layers * self.layer_gradient
            made = self.table
            if self.sharded and self.workload.compute != 4:
                # In 16 bits as it arrives and as autograd keeps it, before it is added in fp32; or,
                # before tensor parallelism splits it, complete in both types.
                shape, width = self.workload.shape, self.workload.compute
                complete = shape.embedding * shape.ways * (width + 4.0) - made
                made = max(made + 2.0 * shape.embedding * width, complete)
            self._note(
                "backward: embedding", activations=self.stream, gradients=early, reduction=made
            )
        self.made.add(task.part)
        if self._sends(task.part - 1):
            self.sent += self.stream
        elif len(self.parts) == 1 and task.part > self.first:
            self.sent = self.stream  # the schedule refers to it until its next gradient is sent
        if task.kind == "B" and self._sends(task.part + 1):
            self.sent += self.stream

    def _sends(self, to: int) -> bool:
        """Whether a part receives data from this stage that is kept until the last task ends."""
        there = self.first <= to <= self.last and to not in self.parts
        return there and len(self.parts) > 1

    def _inputs(self, task: Task) -> None:
        """The half of a backward pass that the previous stage waits for; activations stay."""
        flight = self.flight[task.part, task.micro]
        self._backward(task)
        self.flight[task.part, task.micro] = flight

    def _weights(self, task: Task) -> None:
        self._note("backward: weights", reduction=self.layer_gradient)
        del self.flight[task.part, task.micro]
        if self._sends(task.part + 1):
            self.sent += self.stream
