"""Memory of one process as a timeline: each moment of a step with what is alive in it.

The peak is the largest moment, not a sum of parts: log-probabilities and the gradients of the first
layers are never alive together.
"""

import dataclasses
from collections.abc import Mapping

from finetune.planner import deepspeed
from finetune.planner.block import Layer
from finetune.planner.head import chunked_head
from finetune.planner.resident import state
from finetune.planner.tape import Tape, Trace, Value, trace
from finetune.planner.workload import Workload

# DeepSpeed 0.19's default: parameters that ZeRO-3 may hold gathered.
LIVE_PARAMETERS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Moment:
    """One moment of a step: bytes by component."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The moments of a step in order."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


@dataclasses.dataclass(frozen=True)
class Traces:
    """The layer and the head of a workload, each run once on its tape."""

    layer: Trace
    kept: float
    """Bytes that each layer keeps from the forward to the backward pass."""
    first: float
    """The same for the first layer: without gradients of its input it keeps less."""
    head: Trace
    projected: float
    """Most that last norm and head hold before the loss, inside autocast."""


def traces(workload: Workload) -> Traces:
    held = workload.checkpointing in ("full", "attention")
    layer = _layer_trace(workload, held, enters=True)
    # Frozen embeddings have no gradient; checkpoints need one all the same, and so ask for it.
    enters = workload.adapter is None or held
    first = layer if enters else _layer_trace(workload, held, enters=False)
    stream = float(workload.tokens * workload.shape.hidden * workload.numerics.residual)
    kept, least = (stream, stream) if held else (layer.saved, first.saved)
    if workload.checkpointing == "attention":
        # Its output in the type of the products, and one fp32 statistic per head.
        shape = workload.shape
        of_token = float(shape.query * workload.numerics.compute + 4 * shape.heads)
        kept, least = (each + workload.tokens * of_token for each in (kept, least))
    if workload.checkpointing == "selective":
        kept = least = _layer(workload).kept_selectively()
    if workload.scheme == "fsdp":
        # Units return fp32 and cast what they are given: each layer keeps rotary tables of its own.
        tables = 2.0 * workload.length * workload.shape.head_dim * workload.compute
        kept, least = kept + tables, least + tables
    if workload.activations_on_host:
        kept = least = 0.0
    head, projected = _head(workload)
    return Traces(layer, kept, least, head, projected)


def _layer_trace(workload: Workload, held: bool, enters: bool) -> Trace:
    tape, source, result = _layer(workload).build(enters)
    return trace(tape, source, result, source_held=held)


def _layer(workload: Workload) -> Layer:
    return Layer(
        workload.shape,
        workload.numerics,
        workload.rows,
        workload.length,
        workload.attention,
        workload.adapter.ranks if workload.adapter else {},
    )


def _head(workload: Workload) -> tuple[Trace, float]:
    """Last norm, head and loss, and the most that is held before the loss."""
    if workload.loss.chunked:
        return chunked_head(workload)
    shape, numerics = workload.shape, workload.numerics
    fp32_head = workload.kbit_prepared
    builder = Layer(shape, numerics, workload.rows, workload.length, workload.attention, {})
    tape: Tape = builder.tape
    source = Value(workload.tokens * shape.hidden * numerics.residual)
    normed = builder.norm(source)
    width = 4 if fp32_head else numerics.weights
    weight = Value(shape.embedding * width, grad=numerics.trained, leaf=True)
    given, entries = normed, workload.tokens * shape.vocab
    inner = workload.tokens * shape.hidden * numerics.compute
    if numerics.autocast and normed.size != inner:
        given = tape.run(inner, (normed,))
    if numerics.autocast and width != numerics.compute:
        weight = tape.run(shape.embedding * numerics.compute, (weight,))
    keeps = ([given] if numerics.trained else []) + ([] if weight.leaf else [weight])
    loss = workload.loss
    size = entries * numerics.compute if loss.logits else 0.0
    logits = tape.run(size, (given, weight), keeps)
    if shape.capped_logits:
        logits = builder.capped(logits)
    projected = trace(tape, source, logits).forward
    return trace(tape, source, _loss(workload, tape, logits, entries)), projected


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


def timeline(workload: Workload) -> Timeline:
    """Every moment of a step in the steady state, when the optimizer's moments exist."""
    return _Step(workload).timeline()


class _Step:
    """The quantities of one step, and the moments made of them."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.run = workload, traces(workload)
        self.layers = workload.shape.layers
        trained = workload.adapter is None
        per_layer = workload.shape.layer_parameters if trained else self._adapter_layer()
        self.trained_layer = per_layer
        self.trained_outer = workload.shape.outer_parameters if trained else 0.0
        width = workload.gradient_width / workload.layout.share("grads")
        # Offloaded gradients leave for the host as soon as they are reduced.
        leaves = workload.layout.offload != "none" and not workload.cpu
        immediate = workload.immediate or leaves
        # DeepSpeed with fp32 accumulation: gradients lie in its buckets.
        self.deepspeed = deepspeed.accumulates(workload) and not leaves
        if self.deepspeed and workload.layout.shard != "optimizer":
            immediate = True
        self.immediate = immediate
        self.layer_gradient = 0.0 if immediate else per_layer * width
        self.outer_gradient = 0.0 if immediate else self.trained_outer * width
        self.whole = self.layers * self.layer_gradient + self.outer_gradient
        self.standing = 0.0
        if self.deepspeed:
            self.whole = deepspeed.reduced(workload)
            self.standing = deepspeed.standing(workload)
        # Weights come from other processes, or from the host.
        self.streams = workload.layout.group > 1 or workload.layout.offload == "all"
        self.fsdp = workload.layout.engine == "fsdp" and workload.layout.group > 1
        self.loss = workload.loss.retained * workload.tokens * workload.shape.vocab
        # Kept by checkpoints: the source of each layer stays besides what its own tape holds.
        self.checkpointed = workload.checkpointing in ("full", "attention")

    def _adapter_layer(self) -> float:
        adapter = self.workload.adapter
        return self.workload.sharded / self.layers if adapter else 0.0

    def earlier(self) -> float:
        """Gradients of earlier micro-batches of the same step."""
        if self.workload.accumulation == 1:
            return 0.0
        if (
            self.fsdp and not self.workload.synchronise_each
        ):  # no_sync: whole gradients in the type that they are reduced in
            return float(self.workload.reduce_width) * self.workload.trained
        return self.whole

    def moment(self, name: str, **parts: float) -> Moment:
        base = state(self.workload)
        grown = max(self.earlier() + parts.pop("waiting", 0.0), parts.pop("gradients", 0.0))
        return Moment(name, {**base, "gradients": self.standing + grown, **parts})

    def timeline(self) -> Timeline:
        run, kept = self.run, self._kept(self.layers)
        casts = self._weight_casts()
        stream = float(self.workload.tokens * self.workload.shape.hidden)
        self.incoming = stream * self.workload.numerics.residual
        inside = run.layer.passing if self.checkpointed else run.layer.forward
        moments = [
            self.moment(
                "forward: last layer",
                activations=self._kept(self.layers - 1) + inside + self._held_by_frames(),
                casts=casts,
                units=self._units_forward(),
            ),
            self.moment(
                "forward: head",
                activations=kept,
                loss=run.projected,
                casts=casts,
                units=self._units_loss(),
            ),
            self.moment(
                "forward: loss",
                activations=kept,
                loss=run.head.forward,
                casts=casts,
                units=self._units_loss(),
            ),
            self.moment(
                "backward: loss and head",
                activations=kept,
                loss=run.head.backward + self.loss,
                units=self._units_head(),
                **self._buckets(bool(self.trained_outer)),
            ),
        ]
        names = {0: "backward: last layer", 1: "backward: last layer but one"}
        for index in sorted({0, 1, self.layers - 1} & set(range(self.layers))):
            first = index == self.layers - 1
            moments.append(self._layer("backward: first layer" if first else names[index], index))
        moments.append(self._embedding())
        if self.deepspeed:
            moments.append(self._reduction())
        step = self.moment("optimizer step", update=self._update())
        # By now what earlier micro-batches left has been reduced.
        whole = {**step.parts, "gradients": self.standing + self.whole}
        moments.append(dataclasses.replace(step, parts=whole))
        return Timeline(tuple(moments))

    def _held_by_frames(self) -> float:
        """The embedding's output, which the model's own frame holds while layers run.

        FSDP2's units return fp32 and cast what they are given: the layer's input is held too.
        """
        tokens = float(self.workload.tokens * self.workload.shape.hidden)
        return 8 * tokens if self.fsdp and self.workload.scheme == "fsdp" else self.incoming

    def _kept(self, layers: int) -> float:
        """What the first so many layers keep for the backward pass."""
        return (layers - 1) * self.run.kept + self.run.first if layers else 0.0

    def _layer(self, name: str, index: int) -> Moment:
        """Backward pass of a layer, counted from the last."""
        run, workload = self.run, self.workload
        below = self._kept(self.layers - index - (0 if self.checkpointed else 1))
        transient = run.layer.backward
        if self.checkpointed:  # the layer's forward pass again, with the gradient that came in
            transient = max(transient, run.layer.forward + self.incoming)
        if workload.immediate:
            transient -= run.layer.gradients
        reduced = 0.0
        # The previous unit's gradients, until their reduce-scatter has ended; what earlier
        # micro-batches left lies in that type already.
        if self.fsdp and (workload.accumulation == 1 or workload.synchronise_each):
            reduced = float(workload.reduce_width)
            reduced *= self.trained_layer if index else self._trained_head()
        return self.moment(
            name,
            gradients=self._early() + index * self.layer_gradient,
            waiting=self._waiting(),
            activations=below + transient,
            loss=self.loss,
            units=self._units_backward(index),
            reduction=reduced,
            **self._buckets(),
        )

    def _buckets(self, filling: bool = True) -> dict[str, float]:
        """DeepSpeed's buckets while gradients come, and its copies where one is full already."""
        if not (self.deepspeed and filling):
            return {}
        full = deepspeed.overflows(self.workload)
        copies = deepspeed.reducing(self.workload) if full else 0.0
        return {"buckets": deepspeed.filling(self.workload) + copies}

    def _reduction(self) -> Moment:
        """DeepSpeed's end of a backward pass."""
        copies = deepspeed.reducing(self.workload)
        buckets = deepspeed.filling(self.workload) + copies
        return self.moment("gradients reduced", gradients=self.whole, buckets=buckets)

    def _trained_head(self) -> float:
        """Trained parameters of the head where it is a unit of its own."""
        apart = not (self.workload.root_unit or self.workload.shape.tied)
        return float(self.workload.shape.embedding) if apart and self.trained_outer else 0.0

    def _early(self) -> float:
        """Gradients while layers run backwards, besides those of layers that were reached."""
        if self.deepspeed and deepspeed.overflows(self.workload):
            return self.whole
        return self._head_gradient()

    def _head_gradient(self) -> float:
        """Gradient of the head while layers run backwards."""
        if not self.trained_outer or self.immediate:
            return 0.0
        embedding = float(self.workload.shape.embedding)
        if self.fsdp and self.workload.root_unit:
            return embedding * self.workload.compute  # whole until the root unit has ended
        width = self.workload.gradient_width / self.workload.layout.share("grads")
        return embedding * width

    def _waiting(self) -> float:
        """The head's gradient until the embedding's comes, where they are added to earlier ones."""
        tied = self.workload.shape.tied and not self.fsdp and self.earlier()
        return self._head_gradient() if tied else 0.0

    def _embedding(self) -> Moment:
        """Gradient of the embedding: one whole table, added to the head's where they are tied."""
        workload, shape = self.workload, self.workload.shape
        table = shape.embedding * workload.trained_width if self.trained_outer else 0.0
        extra = 2.0 * table if shape.tied else 0.0
        if self.fsdp or workload.layout.share("grads") > 1:
            extra = (2.0 if shape.tied else 1.0) * table
        reduced = (
            float(workload.reduce_width) * self.trained_outer
            if self.fsdp and workload.root_unit
            else 0.0
        )
        return self.moment(
            "backward: embedding",
            gradients=self._early() if self.deepspeed and self.immediate else self.whole,
            waiting=self._waiting(),
            activations=workload.tokens * shape.hidden * float(workload.numerics.residual),
            loss=self.loss,
            units=self._units_embedding(),
            reduction=extra + reduced,
            **self._buckets(),
        )

    def _update(self) -> float:
        workload = self.workload
        if self.deepspeed:
            return deepspeed.updating(workload)
        if workload.layout.engine == "deepspeed" and workload.layout.offload == "none":
            partition = workload.trained / workload.layout.share("optimizer")
            return 4.0 * partition if workload.gradient_width == 2 else 0.0
        if workload.stepping == "foreach":
            return self.whole
        if workload.stepping == "loop":  # sqrt of the second moment, and that divided: two copies
            table = workload.shape.embedding if self.trained_outer else 0
            largest = max([table, *(m.weights for m in workload.shape.matrices)])
            return 2.0 * largest * workload.trained_width if workload.adapter is None else 0.0
        return 0.0

    def _weight_casts(self) -> float:
        """Casts that autocast caches until its context ends: checkpoints do not free them."""
        workload = self.workload
        cast = workload.numerics.autocast and workload.adapter is None
        if not (cast and self.checkpointed):
            return 0.0
        return 2.0 * self.layers * workload.shape.linear_weights

    @property
    def _table(self) -> float:
        """Embedding or head, gathered whole."""
        return float(self.workload.shape.embedding * self.workload.outer_width)

    def _units_head(self) -> float:
        """Weights gathered while the loss runs backwards."""
        workload = self.workload
        if not self._gathers:
            return 0.0
        if self._stays_gathered:
            return self.layers * workload.unit_bytes + workload.outer_bytes
        if self.fsdp and workload.root_unit:  # the root's unit, and the last layer's ahead
            return workload.outer_bytes + workload.unit_bytes
        return workload.outer_bytes if workload.root_unit else self._table

    def _units_loss(self) -> float:
        """Weights gathered while the loss is computed.

        In the forward pass FSDP2 frees the buffer of a gathering with the next one: of the last
        there are two copies. Tied, the head came first, and the last is a layer.
        """
        workload, units = self.workload, self._units_head()
        if not self.fsdp:
            return units
        if workload.root_unit:
            return workload.outer_bytes if workload.layout.shard == "params" else units
        return units + (workload.unit_bytes if workload.shape.tied else self._table)

    @property
    def _gathers(self) -> bool:
        """Whether weights come from elsewhere when they are needed."""
        layout = self.workload.layout
        return self.streams and (layout.engine == "fsdp" or layout.shard == "params")

    @property
    def _stays_gathered(self) -> bool:
        """Whether FSDP keeps units from the forward to the backward pass."""
        return self.workload.layout.engine == "fsdp" and self.workload.layout.shard == "grads"

    def _units_forward(self) -> float:
        """Weights gathered while the last layer runs forwards: its own in two copies."""
        if not (self._gathers and self._stays_gathered):
            return self._units_backward(0)
        return (self.layers + 1) * self.workload.unit_bytes + self._table

    def _units_backward(self, index: int) -> float:
        """Weights gathered while a layer runs backwards: its own, and the next one's in advance.

        Before the first layer the embedding comes next. What stayed gathered goes layer by layer.
        """
        workload = self.workload
        layout = workload.layout
        if not self._gathers:
            return 0.0
        apart = self.fsdp and not workload.root_unit
        if self._stays_gathered:
            outer = self._table if apart else workload.outer_bytes
            return (self.layers - index) * workload.unit_bytes + outer
        if apart and not workload.shape.tied and index and index == self.layers - 1:
            return workload.unit_bytes + self._table
        outer = workload.outer_bytes if layout.engine == "fsdp" and workload.root_unit else 0.0
        if apart and workload.shape.tied:
            outer = self._table  # one unit with the head, which stays from forward to backward
        ahead = min(2, self.layers) * workload.unit_bytes
        return outer + (ahead if layout.engine == "fsdp" else min(ahead, 2.0 * LIVE_PARAMETERS))

    def _units_embedding(self) -> float:
        """Weights gathered while the embedding runs backwards."""
        workload = self.workload
        if self.fsdp and not workload.root_unit:
            return self._table if workload.shape.tied else 2 * self._table
        return self._units_head() if not workload.root_unit else self._units_loss()
