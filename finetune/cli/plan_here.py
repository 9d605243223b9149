"""Plan on this machine's CPU: memory, and the time of a step at the measured rate."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from finetune import backend as backends
from finetune.cli.options import axes_of
from finetune.errors import FinetuneError
from finetune.planner.estimate import hardware, memory, wording
from finetune.planner.estimate.calibration import Calibration, calibration
from finetune.planner.estimate.judges import judges
from finetune.planner.estimate.predict import Prediction, model_source, predict, workload_of
from finetune.planner.estimate.row_counts import average_tokens, local_rows
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan, plan
from finetune.recipe import Recipe
from finetune.runs import limits

if TYPE_CHECKING:  # tracing imports torch
    from finetune.verification.memory.traced_step import Stages, Verification

Measure = Callable[[backends.Precision], float]
"""Measures the FLOP/s of matrix products on this machine's CPU, over all cores."""
Verify = Callable[[Plan, Workload | None], "Verification | Stages"]
"""Traces a plan and compares the trace with the predictions for a workload, if one is given."""


def plain(
    arguments: argparse.Namespace, recipe: Recipe, verify: Verify | None, measure: Measure | None
) -> int:
    """Print the plan on this machine's CPU; returns the exit status."""
    processes = arguments.processes or arguments.gpus
    machine = backends.load(arguments.backend or recipe.backend)
    machine, count = backends.divided(machine, processes, axes_of(arguments))
    job_plan = plan(recipe, machine, count, arguments.precision)
    here, problem = None, ""
    row_tokens = average_tokens(recipe, arguments.row_tokens)
    try:
        if job_plan.traits.divides:
            raise FinetuneError("a divided model is only planned for GPUs: use --gpu and --gpus")
        here = dataclasses.replace(
            workload_of(job_plan, model_source(recipe).shape, row_tokens),
            cpu=True,
            chained=recipe.kernels.pointwise != "eager",
        )
    except FinetuneError as error:
        if verify is not None or arguments.calibrate:
            raise
        problem = str(error)
    found = None
    if verify is not None and here is not None:
        # The trace is of a GPU's kernels, and so are the formulas that it is compared with.
        there = dataclasses.replace(here, cpu=False, chained=False)
        found = verify(job_plan, there if model_source(recipe).exact else None)
    prediction = None
    if here is not None and measure is not None:
        each = measure(job_plan.backend.precision) / job_plan.processes
        memory_here = limits.memory().total
        cpu = hardware.processor(each, job_plan.processes, memory_here)
        rows = arguments.rows or local_rows(recipe)
        prediction = predict(job_plan, cpu, rows, row_tokens, here)
    timeline = None if here is None else memory.timeline(here)
    kept = None if prediction is None else calibrated(arguments, prediction.machine)
    if arguments.json:
        record: dict[str, Any] = dict(job_plan.summary())
        record["memory"] = None if timeline is None else moments(timeline)
        record["source"] = None if here is None else model_source(recipe).where
        record["time"] = None if prediction is None else prediction.summary()["time"]
        record |= {} if found is None else {"verification": found.summary()}
        record |= {} if kept is None else {"calibration": dataclasses.asdict(kept)}
        print(json.dumps(record, indent=2))
        return status(found)
    print(job_plan.explain())
    if timeline is None:
        print(f"memory       not predicted: {problem}")
        return 0
    print(f"shapes       {model_source(recipe).where}")
    print(_page(timeline, job_plan.processes, limits.memory().total, prediction))
    if kept is not None and prediction is not None:
        print(kept.line(prediction.times.step, timeline.peak.total))
    if found is not None:
        print(f"\n{found.page()}")
    return status(found)


def calibrated(arguments: argparse.Namespace, machine: hardware.Machine) -> Calibration | None:
    """What own runs on the machine's card took of their predictions; None if not asked for."""
    return calibration(arguments.runs, machine.gpu.name) if arguments.calibrate else None


def status(found: "Verification | Stages | None") -> int:
    """Exit status: 1 if a trace disagrees with the plan's numbers."""
    return 0 if found is None or found.agrees else 1


def moments(timeline: memory.Timeline) -> list[dict[str, Any]]:
    """The moments of a step as plain values, for JSON."""
    return [
        {"name": moment.name, "bytes": moment.total, "parts": dict(moment.parts)}
        for moment in timeline.moments
    ]


def _page(
    timeline: memory.Timeline, processes: int, available: int, prediction: Prediction | None
) -> str:
    """Text on memory and time of a plan on a machine without a GPU."""
    peak = timeline.peak
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {wording.size(count)}" for name, count in largest)
    lines = [f"memory       {wording.size(peak.total)} per process in '{peak.name}': {parts}"]
    if prediction is not None:
        times, gpu = prediction.times, prediction.machine.gpu
        full = " if every row is full" if prediction.workload.mean_length == 1 else ""
        lines.append(
            f"speed        {wording.duration(times.step)} a step, {times.tokens_per_second:,.0f} "
            f"tokens/s on this CPU{full}: {gpu.flops / 1e9:,.0f} GFLOP/s a "
            f"process (measured), {gpu.reached:.0%} of it in products (an assumption)"
        )
        found = judges(prediction.plan.recipe, cpu=True)
        lines += [wording.judge_words(found)] if found else []
        if prediction.seconds is not None:
            long = wording.duration(prediction.seconds)
            lines.append(f"whole run    {prediction.steps:,} steps, {long}")
        else:
            lines.append(
                f"whole run    {wording.whole_run(prediction).removeprefix('whole run: ')}"
            )
    lines.append(
        f"machine      no GPU here; {wording.size(available)} of memory for {processes} processes. "
        "Name a GPU to plan for it: --gpu H100-80 --gpus 8"
    )
    return "\n".join(lines)
