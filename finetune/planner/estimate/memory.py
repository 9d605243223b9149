"""Predict the memory of one process as a timeline of a step.

The peak is the largest moment, not the sum of all components: for example, log-probabilities and
the gradients of the first layers are never in memory at the same time.
"""

import dataclasses

from finetune.planner.estimate import pipeline_memory, stage_workload
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.moments import Moment, Timeline
from finetune.planner.estimate.sampling_cost import sampling
from finetune.planner.estimate.sharding.gathered import Gathered
from finetune.planner.estimate.sharding.resident import cast_weights, copied, loading, state
from finetune.planner.estimate.sharding.zero import Gradients
from finetune.planner.estimate.tower_memory import with_tower
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture


def timeline(workload: Workload) -> Timeline:
    """Every moment of a step after the first, when the moments of the optimizer exist.

    With a pipeline, the timeline is that of one stage (`workload.layout.stage`).
    """
    axes = workload.layout.axes
    here = stage_workload.here(workload) if axes.any else workload
    found = pipeline_memory.timeline(workload) if axes.pipeline > 1 else _Step(here).timeline()
    before = (*_reference_pass(here), *_sampling(workload, here))
    moments = (*before, *found.moments, *_saving(here))
    return Timeline(tuple(with_tower(here, moments)))


def _reference_pass(here: Workload) -> list[Moment]:
    """The reference model's pass over all rows, before the trained model is loaded."""
    shape = here.reference_shape
    if shape is None or here.reference_stays:
        return []
    parts = {"reference": here.reference_bytes, "activations": inference(here, shape)}
    return [Moment("reference pass", parts)]


def _sampling(workload: Workload, here: Workload) -> list[Moment]:
    """The sampling of completions before a step, whose prompts are read first."""
    found = sampling(workload)
    if found is None:
        return []
    parts = {"units": found.units + found.weights, "activations": found.cache, "loss": found.logits}
    return [Moment("sampling", {**state(here), **parts})]


def _saving(here: Workload) -> list[Moment]:
    """Saving between two steps, with the copy from which a checkpoint is written.

    The copy is in host memory, which is counted only without an accelerator.
    """
    if not here.cpu:
        return []
    buckets = Gradients(here)
    standing = buckets.standing * (buckets.accumulates and not buckets.leave)
    return [Moment("saving", {**state(here), "gradients": standing, "copy": copied(here)})]


def by_stage(workload: Workload) -> list[Timeline]:
    """The timelines of all stages; a single one without a pipeline."""
    places = range(workload.layout.axes.pipeline)
    return [timeline(at_stage(workload, stage)) for stage in places]


def at_stage(workload: Workload, stage: int) -> Workload:
    """The workload of a process on a pipeline stage."""
    layout = dataclasses.replace(workload.layout, stage=stage)
    return dataclasses.replace(workload, layout=layout)


class _Step:
    """The sizes of one step, and its moments."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.run = workload, traces(workload)
        shape, layout, adapter = workload.shape, workload.layout, workload.adapter
        self.layers = shape.layers
        self.gathered, self.buckets = Gathered(workload), Gradients(workload)
        self.fsdp = self.gathered.fsdp
        # Trained parameters of a layer, and outside the layers.
        held = workload.trained_inner / max(1, self.layers)
        self.trained_layer = held * shape.layer_parameters / shape.held_layer
        self.trained_outer = float(workload.trained_outer)
        if adapter is not None:
            held = self.trained_layer = (workload.sharded - adapter.whole) / self.layers
            self.trained_outer = float(adapter.whole)
        # DeepSpeed with fp32 accumulation stores gradients in its buckets.
        self.deepspeed = self.buckets.accumulates and not self.buckets.leave
        # DDP's gradients are views of its buckets, except those of earlier micro-batches.
        in_buckets = layout.traits.copies_gradients and layout.processes > 1
        self.in_buckets = in_buckets and workload.accumulation == 1
        # Offloaded gradients move to the host as soon as they are reduced.
        self.immediate = workload.immediate or self.buckets.leave or self.in_buckets
        self.immediate |= self.deepspeed and layout.shard != "optimizer"
        width = workload.gradient_width / layout.share("grads")
        self.layer_gradient = 0.0 if self.immediate else held * width
        self.outer_gradient = 0.0 if self.immediate else self.trained_outer * width
        if adapter is None and layout.group == 1 and workload.trains("embedding"):
            # The gradient of a table that tensor parallelism splits is not divided.
            self.outer_gradient += (shape.ways - 1) * shape.embedding * width
        self.whole = self.layers * self.layer_gradient + self.outer_gradient
        self.standing = 0.0
        if self.deepspeed:
            self.whole, self.standing = self.buckets.reduced, self.buckets.standing
        once = workload.accumulation == 1 or workload.synchronise_each
        self.reduces = self.fsdp and once
        """Whether FSDP reduces the gradients of every micro-batch."""
        self.loss = workload.loss.retained * workload.tokens * shape.vocab
        self.trained_experts = workload.divided_experts if adapter is None else 0.0
        """Trained elements of a layer's experts if they are a separate unit, reduced first."""
        # Gradient of a head in FSDP's root unit, or in one with the embedding, which is reduced
        # last; of any other head during the backward pass of the layers.
        in_root = self.fsdp and (workload.root_unit or workload.tied) and workload.trains("head")
        self.unreduced_head = float(shape.head_weights * workload.compute) if in_root else 0.0
        kept = workload.trains("head") and not (self.immediate or self.unreduced_head)
        self.head_gradient = float(shape.head_weights) * width if kept else 0.0
        tied = workload.tied and not self.fsdp and self.earlier()
        self.waiting = self.head_gradient if tied else 0.0
        """Gradient of a tied head until it is added, with the embedding's, to earlier gradients."""
        # Gradients outside layers during the backward pass of the layers.
        overflows = self.deepspeed and self.buckets.overflows
        self.early = self.whole if overflows else self.head_gradient

    def earlier(self) -> float:
        """Gradients of earlier micro-batches of the same step."""
        if self.workload.accumulation == 1:
            return 0.0
        if self.fsdp and not self.workload.synchronise_each:  # unsharded, as they are reduced
            return float(self.workload.reduce_width) * self.workload.trained
        return self.whole

    def moment(self, name: str, **parts: float) -> Moment:
        base = state(self.workload)
        grown = max(self.earlier() + parts.pop("waiting", 0.0), parts.pop("gradients", 0.0))
        return Moment(name, {**base, "gradients": self.standing + grown, **parts})

    def timeline(self) -> Timeline:
        run, kept = self.run, self.run.kept_by(self.layers)
        # Autocast caches its casts until its context ends, despite checkpointing.
        cached = self.workload.autocast and self.workload.recomputes
        casts = 2.0 * cast_weights(self.workload) if cached else 0.0
        stream = float(self.workload.tokens * self.workload.shape.hidden)
        self.incoming = stream * self.workload.residual
        inside = run.layer.passing if self.workload.recomputes else run.layer.forward
        found = loading(self.workload)
        moments = [Moment("loading", found)] if found else []
        if self.fsdp:
            parts = {"activations": self.incoming, "units": self.gathered.entering()}
            moments.append(self.moment("forward: embedding", **parts))
        moments += [
            self.moment(
                "forward: last layer",
                # The frame of the model's forward keeps the embedding's output alive.
                activations=self.run.kept_by(self.layers - 1) + inside + self.incoming,
                casts=casts,
                units=self.gathered.forward(),
            ),
            self._head(kept, casts),
            self.moment(
                "forward: loss",
                activations=kept,
                loss=run.head.trace.forward,
                casts=casts,
                units=self.gathered.at_loss(),
            ),
            self._loss_and_head(kept),
        ]
        last = self.layers - 1
        names = {last - 1: "backward: first layer but one"} if self.fsdp else {}  # it prefetches
        names |= {1: "backward: last layer but one", 0: "backward: last layer"}
        names |= {last: "backward: first layer"}
        moments += [self._layer(names[at], at) for at in sorted(names) if 0 <= at <= last]
        moments.append(self._embedding())
        teacher = self._teacher()
        moments += [] if teacher is None else [teacher]
        if self.deepspeed:
            full = self.buckets.filling + self.buckets.reducing
            moments.append(self.moment("gradients reduced", gradients=self.whole, buckets=full))
        step = self.moment("optimizer step", update=self._update())
        # By now the gradients of earlier micro-batches have been reduced.
        whole = {**step.parts, "gradients": self.standing + self.whole}
        moments.append(dataclasses.replace(step, parts=whole))
        return Timeline(tuple(moments))

    def _head(self, kept: float, casts: float) -> Moment:
        """The head's forward pass up to the logits, or the gathering of its weights if larger."""
        name, run = "forward: head", self.run
        held = {"activations": kept, "casts": casts}
        arrives = self.moment(name, **held, loss=run.head.entering, units=self.gathered.arriving())
        runs = self.moment(name, **held, loss=run.head.projected, units=self.gathered.at_loss())
        return max(arrives, runs, key=lambda moment: moment.total)

    def _loss_and_head(self, kept: float) -> Moment:
        """Backward of loss and head; FSDP2 frees a head unit before the backward of the norm."""
        head, gathered = self.run.head, self.gathered
        parts = {"activations": kept, **self._buckets(bool(self.trained_outer))}

        def moment(most: float, units: float) -> Moment:
            return self.moment(
                "backward: loss and head", loss=most + self.loss, units=units, **parts
            )

        if not gathered.frees_head:
            return moment(head.trace.backward, gathered.at_head())
        apart = moment(head.apart, gathered.at_head())
        norm = moment(head.trace.backward, gathered.ahead)
        return max(apart, norm, key=lambda each: each.total)

    def _layer(self, name: str, index: int) -> Moment:
        """Backward pass of the layer at `index`, counted from the last layer."""
        run, workload = self.run, self.workload
        below = self.run.kept_by(self.layers - index - (0 if self.workload.recomputes else 1))
        transient = run.layer.backward
        if self.workload.recomputes:  # the layer's forward pass again, with the incoming gradient
            transient = max(transient, run.layer.forward + self.incoming)
        if workload.immediate or self.in_buckets:
            transient -= run.layer.gradients
        reduced = 0.0
        # Gradients of the previous unit, until their reduce-scatter has ended; those of earlier
        # micro-batches already have that data type.
        if self.reduces:
            # The head is a unit of its own unless it is tied or in the root unit.
            alone = workload.trains("head") and not (workload.root_unit or workload.tied)
            head = float(workload.shape.head_weights) if alone else 0.0
            before = self.trained_layer - self.trained_experts if index else head
            reduced = float(workload.reduce_width) * before

        def moment(activations: float, units: float, reduction: float) -> Moment:
            return self.moment(
                name,
                gradients=self.early + index * self.layer_gradient,
                waiting=self.waiting,
                activations=activations,
                loss=self.loss,
                units=units,
                reduction=reduction + self.unreduced_head,
                **self._buckets(),
            )

        units = self.gathered.backward(index)
        moments = [moment(below + transient, units, reduced)]
        if self.fsdp and workload.divided_experts:
            arrives = self.run.kept_by(self.layers - index) + self.incoming
            moments.append(moment(arrives, self.gathered.experts_arriving(), reduced))
        if self.fsdp and self.trained_experts:
            moments.append(moment(*self._experts_reduced(below, units)))
        return max(moments, key=lambda each: each.total)

    def _experts_reduced(self, below: float, units: float) -> tuple[float, float, float]:
        """Activations, gathered units and buffers while gradients of divided experts are reduced.

        The experts' weights are freed before, and their gradients once they are in the buffer,
        apart from those of the last tensor. FSDP2 divides a copy of the buffer if no other process
        has the same experts.
        """
        workload, elements = self.workload, self.trained_experts
        shape, shards, width = workload.shape, workload.layout.expert_shards, workload.reduce_width
        experts = shape.experts
        assert experts is not None
        gradients = elements * workload.compute
        last = workload.compute * experts.count * experts.width * shape.hidden
        results = 2 * width * elements if shards == 1 else width * elements / shards + last
        reduced = width * elements + max(gradients, results)
        activations = below + self.run.layer.marked - gradients
        return activations, units - elements * workload.compute, reduced

    def _buckets(self, filling: bool = True) -> dict[str, float]:
        """DeepSpeed's buckets during the backward pass, and its copies if one has filled up."""
        if not (self.deepspeed and filling):
            return {}
        copies = self.buckets.reducing if self.buckets.overflows else 0.0
        return {"buckets": self.buckets.filling + copies}

    def _teacher(self) -> Moment | None:
        """The teacher's forward pass before the student's; it saves nothing."""
        teacher = self.workload.teacher
        if teacher is None:
            return None
        gathered = 2.0 * teacher.unit_bytes if teacher.layout.share("params") > 1 else 0.0
        inside = inference(teacher, teacher.shape)
        return self.moment("forward: teacher", activations=inside, units=gathered)

    def _embedding(self) -> Moment:
        """One unsharded table, added to the gradient of a tied head or an earlier micro-batch.

        FSDP reduces the last layer while it arrives, and then its own unit, whose weights it frees.
        """
        workload, shape = self.workload, self.workload.shape
        elements = float(shape.embedding) if workload.trains("embedding") else 0.0

        def moment(gradients: float, reduction: float, units: float) -> Moment:
            return self.moment(
                "backward: embedding",
                gradients=gradients,
                waiting=self.waiting,
                activations=workload.tokens * shape.hidden * float(workload.residual),
                loss=self.loss,
                units=units,
                reduction=reduction + (shape.ways - 1) * table,  # split only when it is reduced
                **self._buckets(),
            )

        units = self.gathered.at_embedding()
        if self.reduces:
            table, layers = elements * workload.compute, self.layers * self.layer_gradient
            held = self.unreduced_head + table + workload.reduce_width * self.trained_layer
            arrives = moment(layers + self.head_gradient, held, units)
            # A new shard beside those of earlier micro-batches.
            again = (workload.accumulation > 1) / workload.layout.group
            unit = elements if self.gathered.apart else self.trained_outer
            reduced = unit * (workload.compute + workload.reduce_width * (1 + again))
            return max(arrives, moment(self.whole, reduced, 0.0), key=lambda each: each.total)
        table = elements * workload.trained_width
        copies = 1 if self.fsdp or workload.layout.share("grads") > 1 else workload.accumulation > 1
        whole = self.early if self.deepspeed and self.immediate else self.whole
        return moment(whole, (2.0 if workload.tied else copies) * table, units)

    def _update(self) -> float:
        workload = self.workload
        if self.deepspeed:
            return self.buckets.updating
        if workload.layout.traits.masters and workload.layout.offload == "none":
            partition = workload.trained / workload.layout.share("optimizer")
            return 4.0 * partition if workload.gradient_width == 2 else 0.0
        if workload.stepping == "foreach":
            return float(workload.trained * workload.trained_width)
        if workload.stepping == "loop":  # two copies: sqrt of the second moment, and the quotient
            table = workload.shape.embedding if self.trained_outer else 0
            largest = max([table, *(m.weights for m in workload.shape.matrices)])
            return 2.0 * largest * workload.trained_width if workload.adapter is None else 0.0
        return 0.0


def inference(workload: Workload, shape: Architecture) -> float:
    """Peak bytes of a forward pass without gradients, excluding weights.

    Embedded tokens, the hidden state before and inside a layer, its norm, and the widest part of a
    layer: gate, up and their product.
    """
    token = 4.0 * shape.hidden * workload.residual + 3.0 * shape.width * workload.compute
    return workload.tokens * token
