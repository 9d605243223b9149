"""Explain an out-of-memory error: the prediction, what to change, and where to resume."""

import dataclasses
from collections.abc import Iterator

import torch

from finetune import backend as backends
from finetune import catalog
from finetune.errors import TrainingFailure
from finetune.planner import Plan, schedules
from finetune.planner.estimate import advice, memory
from finetune.planner.estimate.fewest_changes import changes
from finetune.planner.estimate.forecast import Forecast
from finetune.planner.estimate.layout import of_backend
from finetune.planner.estimate.workload import Workload
from finetune.planner.request import requested
from finetune.planner.rules import incompatibilities
from finetune.planner.shapes.config_files import fields_of
from finetune.runs import units
from finetune.training.memory_meter import peak_bytes

MOST_NAMED = 3
"""Maximum number of changes listed in a message."""
USUAL = (
    "batch.micro_rows=1 (or fewer batch.micro_tokens)", "model.activation_checkpointing=true",
    "a backend that shards",
)  # fmt: skip
"""Changes to suggest without a prediction."""


def out_of_memory(
    error: BaseException,
    plan: Plan,
    rank: int,
    device: torch.device,
    forecast: Forecast | None,
    step: int,
    standing: str,
) -> TrainingFailure:
    """The error to raise for a run that ran out of memory.

    Args:
        rank: the rank of this process; if the model is divided, its place and layers are named.
        device: the device of this process.
        step: the current step, from 1; 0 before the first.
        standing: a sentence on where the run can be resumed from.
    """
    mesh = plan.mesh
    when = f"step {step}" if step else "before step 1"
    peak = units.size(peak_bytes(device))
    sentences = str(error).strip().splitlines()[0].split(". ")
    tried = ". ".join(part for part in sentences if "ried to allocate" in part) or sentences[0]
    stage = mesh.place(rank)["pipeline"]
    predicted = "no prediction for this model"
    if forecast is not None:
        predicted = f"{units.size(round(_peak(forecast.workload, stage)))} predicted"
    where = f" ({mesh.where(rank)})" if plan.backend.axes.any else ""
    return TrainingFailure(
        f"{when}: out of memory on {device} of rank {rank}{where}, which had used up "
        f"to {peak} ({predicted}): {tried.rstrip('.')}; {_of_stage(plan, stage, forecast)}change "
        f"{' or '.join(_changes(plan, stage, forecast))}; {standing}"
    )


def _of_stage(plan: Plan, stage: int, forecast: Forecast | None) -> str:
    """The layers of a pipeline stage and how to move some to others; empty without a pipeline."""
    axes, fields = plan.backend.axes, fields_of(plan.recipe)
    layers = (fields.get("text_config") or fields).get("num_hidden_layers")
    if axes.pipeline == 1 or not layers:
        return ""
    spans, mine = schedules.spans(layers, axes), schedules.parts_of(stage, axes)
    parts = [f"layers {' and '.join(schedules.span_words(spans[part]) for part in mine)}"]
    parts = ["the embedding"] * (0 in mine) + parts + ["the head"] * (len(spans) - 1 in mine)
    moves = list(_moves(plan, stage, forecast))
    moved = f"; move layers to other processes with {' or '.join(moves)}, or " if moves else "; "
    return f"stage {stage} of {axes.pipeline} holds {', '.join(parts)}{moved}"


def _moves(plan: Plan, stage: int, forecast: Forecast | None) -> Iterator[str]:
    """Larger axes with which the process of a stage holds less, and that the recipe can run on."""
    axes = plan.backend.axes
    for field, size in (("pipeline", axes.pipeline), ("tensor", axes.tensor)):
        if size == 1:
            continue
        current = dataclasses.replace(plan.backend, processes=plan.processes)
        machine, count = backends.divided(current, None, {field: 2 * size})
        if incompatibilities(requested(plan.recipe, machine, count)):
            continue
        if forecast is None:
            yield f"--{field} {2 * size}"
            continue
        moved = advice.on(forecast.workload, of_backend(machine, count), _precision(forecast))
        there = stage
        if field == "pipeline":  # the first stage stays the first, and the last stays the last
            there = 2 * stage + (stage == size - 1)
        gain = _peak(forecast.workload, stage) - _peak(moved, there)
        if gain > 0:
            yield f"--{field} {2 * size} (-{units.size(round(gain))})"


def _changes(plan: Plan, stage: int, forecast: Forecast | None) -> list[str]:
    """Settings that lower the peak of a stage and that the recipe can run with, free ones first."""
    if forecast is None or forecast.machine is None:
        return list(USUAL)
    work = forecast.workload
    fullest = max((0, plan.mesh.pipeline - 1), key=lambda each: _peak(work, each))
    found = changes(memory.at_stage(work, fullest), forecast.machine, _precision(forecast))
    named = list[str]()
    for each in found:
        there = min(stage, each.workload.layout.axes.pipeline - 1)
        gain = _peak(work, stage) - _peak(each.workload, there)
        if gain > 0 and _runs(plan, each.setting):
            named.append(f"{each.setting} (-{units.size(round(gain))})")
    return named[:MOST_NAMED] or list(USUAL)


def _peak(workload: Workload, stage: int) -> float:
    """Predicted peak bytes of a process of a stage."""
    return memory.timeline(memory.at_stage(workload, stage)).peak.total


def _precision(forecast: Forecast) -> str:
    return "fp32" if forecast.workload.compute == 4 else "bf16"


def _runs(plan: Plan, setting: str) -> bool:
    """Whether the recipe can run with a change, as `changes` writes it."""
    axes = plan.backend.axes
    if not axes.any:
        return True
    if setting.startswith("--backend "):
        machine = backends.load(setting.removeprefix("--backend "))
        return not incompatibilities(requested(plan.recipe, machine, plan.processes))
    changed = catalog.override(plan.recipe, setting.split())
    before = {choice.option: choice.value for choice in plan.kernels}
    after = Plan(changed, plan.backend, plan.processes)
    helps = setting.startswith("kernels.") <= (
        {choice.option: choice.value for choice in after.kernels} != before
    )
    return helps and not incompatibilities(requested(changed, plan.backend, plan.processes))
