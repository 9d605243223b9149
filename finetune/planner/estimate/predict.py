"""Predict memory, communication and time of a plan on a machine, and whether it fits."""

import dataclasses
import math
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.estimate import (
    advice,
    communication,
    hardware,
    layout,
    memory,
    totals,
    traffic,
)
from finetune.planner.estimate.adapter_sizes import Adapter, lora, named_expert_size
from finetune.planner.estimate.head_losses import CHUNKED, LABELLED, OURS, SCORES
from finetune.planner.estimate.judges import leaving_room
from finetune.planner.estimate.optimizer_state import measured
from finetune.planner.estimate.row_counts import average_tokens, held_out_rows, steps_of
from finetune.planner.estimate.sharding.nvme import Swapped
from finetune.planner.estimate.timing import Times, passes
from finetune.planner.estimate.trained_share import share
from finetune.planner.estimate.workload import AttentionKind, Workload
from finetune.planner.families import family_of
from finetune.planner.kernels import Choice
from finetune.planner.plan import Plan, synchronises_each
from finetune.planner.shapes.architecture import Architecture
from finetune.planner.shapes.config_files import Source, model_source
from finetune.recipe import Model, Recipe
from finetune.recipe.references import second_model

LOSSES_OF_HEADS = {"chunked": CHUNKED, "whole": OURS, "labelled": LABELLED, "scores": SCORES}
"""Memory model of the loss, by the value of the kernel option `head`."""


def workload_of(plan: Plan, shape: Architecture, row_tokens: int | None = None) -> Workload:
    """The workload of one process of a plan.

    Args:
        row_tokens: average number of tokens per row; by default rows are full.
    """
    recipe, backend = plan.recipe, plan.backend
    mean, batch = min(1.0, (row_tokens or recipe.row_length) / recipe.row_length), recipe.batch
    # By tokens, micro-batches are full, and shorter rows make fewer of them.
    fewer = mean if batch.micro_tokens is not None and not batch.packing else 1.0
    place = layout.of_backend(backend, plan.processes)
    kinds: dict[str, AttentionKind] = {"eager": "eager"}
    # The formulas of a type may be those of another one, for whose classes there are kernels.
    known = shape.tower is None or bool(family_of(shape.kind).classes)
    return Workload(
        shape=shape,
        rows=recipe.most_micro_rows * recipe.documents_per_row,
        length=recipe.batch.max_length,
        documents=recipe.documents_per_row,
        scheme=advice.scheme_of(place, backend.precision),
        fp16=backend.precision == "fp16",
        layout=place,
        adapter=_adapter(recipe, shape),
        share=share(shape, recipe.model.trainable),
        quantization=recipe.model.quantization,
        checkpointing=recipe.model.checkpointing,
        activations_on_host=recipe.model.activation_checkpointing == "offload",
        attention=kinds.get(recipe.model.attention, "flash"),
        loss=LOSSES_OF_HEADS[next(k.value for k in plan.kernels if k.option == "head")],
        taught=recipe.teaches,
        teacher_shape=_shape_of(recipe, recipe.taught_by),
        teacher_quantization=recipe.taught_by.quantization if recipe.taught_by else "none",
        reference_shape=_shape_of(recipe, second_model(recipe)),
        reference_stays=recipe.needs_second_model,
        update=recipe.optim.name,
        state=measured(recipe.optim),
        ema=recipe.optim.ema_decay is not None,
        accumulation=max(1, math.ceil(plan.accumulation * fewer)),
        mean_length=1.0 if batch.packing else mean / fewer,
        padded=not plan.padding.free,
        document=mean * batch.max_length,
        root_unit=place.axes.any,
        synchronise_each=synchronises_each(recipe),
        ahead=recipe.passes_before_step,
        sampled=None if recipe.sampled is None or recipe.sampled.elsewhere else recipe.sampled,
        wide_gradients=True,
        fused_norms=known and Choice("norm", "fused") in plan.kernels,
        fused_activations=known and Choice("activation", "fused") in plan.kernels,
        fused_rotations=known and Choice("rotary", "fused") in plan.kernels,
        grouped_adapters=Choice("lora", "grouped") in plan.kernels,
        compiled=recipe.kernels.blocks == "compiled",
    )


def _shape_of(recipe: Recipe, model: Model | None) -> Architecture | None:
    """The shape of a model other than the trained one; None for None."""
    if model is None:
        return None
    return model_source(dataclasses.replace(recipe, model=model, adapter=None)).shape


def _adapter(recipe: Recipe, shape: Architecture) -> Adapter | None:
    given = recipe.adapter
    if given is None:
        return None
    if given.kind != "lora":
        raise FinetuneError(
            f"adapter.kind: no formula predicts the memory and time of {given.kind}"
        )
    made = lora(
        shape,
        given.r,
        given.targets,
        width=4,  # PEFT keeps adapters in fp32
        dropout=given.dropout > 0,
        dora=given.use_dora,
        excluded=given.exclude_modules,
        only_layers=given.layers_to_transform,
        rank_pattern=given.rank_pattern,
        saved=given.modules_to_save,
    )
    rows = _rows(given.trainable_token_indices, shape)
    head = shape.scores * shape.hidden  # trained in full
    made = dataclasses.replace(
        made, parameters=made.parameters + rows + head, whole=made.whole + head
    )
    if shape.experts is None or not given.target_parameters or given.targets == "all-linear":
        return made
    layers = len(given.layers_to_transform) or shape.layers
    inner = layers * named_expert_size(shape, given.r, given.r, given.target_parameters)
    return dataclasses.replace(
        made, parameters=made.parameters + inner, experts=given.r if inner else 0
    )


Tokens = tuple[int | str, ...]


def _rows(tokens: Tokens | dict[str, Tokens], shape: Architecture) -> int:
    """Parameters of the rows that `adapter.trainable_token_indices` trains."""
    if isinstance(tokens, dict):
        return shape.hidden * sum(len(each) for each in tokens.values())
    return shape.hidden * len(tokens) * shape.tables


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted memory, communication and time of a plan on a machine, in bytes and seconds."""

    plan: Plan
    machine: hardware.Machine
    source: Source
    workload: Workload
    timeline: memory.Timeline
    totals: totals.Totals
    usable: float
    status: advice.Status
    host: float
    """Bytes of host memory per node."""
    disk: float
    """Bytes on a node's disk, excluding checkpoints."""
    volume: communication.Volume
    times: Times
    steps: int | None
    """Optimizer steps of the run; None if the number of rows is unknown."""
    rows: int | None = None
    """Rows of the training set; None if unknown."""
    held_out: int | None = None
    """Rows of an evaluation; None if unknown."""
    stages: tuple[memory.Timeline, ...] = ()
    """Timeline of each pipeline stage; a single one without a pipeline."""

    @property
    def links(self) -> list[traffic.Link]:
        """Bytes that a process sends along each axis per step, and their time."""
        return traffic.links(self.volume, self.workload, self.machine)

    @property
    def seconds(self) -> float | None:
        """Seconds of the complete run, with the reference and evaluations; None if unknown."""
        if self.steps is None:
            return None
        besides = (self.reference_seconds or 0.0) + (self.evaluation_seconds or 0.0)
        return self.steps * self.times.step + besides

    @property
    def evaluation_seconds(self) -> float | None:
        """Seconds of all losses of held-out rows: forward passes, without `evaluation.metrics`.

        None if the number of rows or of steps is unknown, and for sampled completions.
        """
        recipe = self.plan.recipe
        if not self.held_out or self.steps is None or recipe.sampled is not None:
            return None
        trained = round(self.steps * recipe.batch.rows / recipe.epochs)
        every = self.plan.interval(recipe.evaluation.every, trained) or self.steps
        steps = math.ceil(self.steps / every) * self.held_out / recipe.batch.rows
        return steps * self.times.training / passes(self.workload)

    @property
    def reference_seconds(self) -> float | None:
        """Seconds of the reference model's pass over all rows before the first step.

        A method that reads the KL of a step adds one more row for each row of the run. None without
        a reference, or if the number of steps is unknown.
        """
        recipe = self.plan.recipe
        if not recipe.reads_reference or self.steps is None:
            return None
        rows = self.steps * recipe.batch.rows
        read = rows / recipe.epochs if self.rows is None else self.rows
        scored = (read + rows * recipe.passes_before_step) / recipe.batch.rows
        return scored * self.times.training / passes(self.workload)

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of the complete run; None if its length is unknown."""
        return None if self.seconds is None else self.seconds * self.machine.count / 3600

    @property
    def cost(self) -> float | None:
        """Cost of the run in the currency of the price; None if unknown."""
        if self.gpu_hours is None or self.machine.price is None:
            return None
        return self.gpu_hours * self.machine.price

    def page(self) -> str:
        """The prediction as text, as printed by `finetune plan`."""
        from finetune.planner.estimate import fewest_changes, wording

        safe = self.status == "safe"
        precision = self.plan.backend.precision
        found = [] if safe else fewest_changes.changes(self.workload, self.machine, precision)
        return wording.page(self, found)

    def summary(self) -> dict[str, Any]:
        """Plain values, in bytes and seconds, for JSON."""
        times, volume = self.times, self.volume
        return {
            "machine": dataclasses.asdict(self.machine),
            "model": {
                "source": self.source.where,
                "parameters": self.source.shape.parameters,
                "active_parameters": self.source.shape.active_parameters,
                "trained_parameters": self.workload.trained,
            },
            "memory": {
                "moments": [
                    {"name": moment.name, "bytes": moment.total, "parts": dict(moment.parts)}
                    for moment in self.timeline.moments
                ],
                "peak": self.timeline.peak.name,
                "stages": [found.peak.total for found in self.stages],
                **dataclasses.asdict(self.totals),
                "usable": self.usable,
                "status": self.status,
                "host_per_node": self.host,
                "disk_per_node": self.disk,
            },
            "communication": {
                **dataclasses.asdict(volume),
                "total": volume.total,
                "links": [dataclasses.asdict(link) for link in self.links],
            },
            "time": {
                **dataclasses.asdict(times),
                "tokens_per_second": times.tokens_per_second,
                "steps": self.steps,
                "seconds": self.seconds,
                "reference_seconds": self.reference_seconds,
                "evaluation_seconds": self.evaluation_seconds,
                "gpu_hours": self.gpu_hours,
                "cost": self.cost,
            },
        }


def predict(
    plan: Plan,
    machine: hardware.Machine,
    rows: int | None = None,
    row_tokens: int | None = None,
    workload: Workload | None = None,
) -> Prediction:
    """Predict memory, communication and time of a plan on a machine.

    Args:
        rows: rows of the training set, for the length of the complete run.
        row_tokens: average number of tokens per row; by default looked up.
        workload: of a process on a CPU; by default on a GPU.

    Raises:
        FinetuneError: the model's shape is unknown, or the machine has a different number of GPUs
            than the plan has processes.
    """
    if machine.count != plan.processes:
        raise FinetuneError(
            f"--gpus {machine.count}: the plan runs {plan.processes} processes, one per GPU"
        )
    source = model_source(plan.recipe)
    machine = leaving_room(machine, plan.recipe)
    row_tokens = average_tokens(plan.recipe, row_tokens)
    workload = workload or workload_of(plan, source.shape, row_tokens)
    option = advice.option(workload, machine)
    stages = memory.by_stage(workload)
    timeline = max(stages, key=lambda found: found.peak.total)
    on_disk = workload.layout.device == "nvme"
    disk = Swapped(workload).disk * machine.per_node if on_disk else 0.0
    return Prediction(
        plan,
        machine,
        source,
        workload,
        timeline,
        totals.of(timeline, workload, machine),
        option.usable,
        option.status,
        option.host,
        disk,
        option.moved,
        option.times,
        steps_of(plan, rows, row_tokens),
        None if plan.recipe.batch.packing else rows,
        held_out_rows(plan.recipe, rows),
        tuple(stages),
    )
