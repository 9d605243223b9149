"""Trace a step of a plan in a separate process, and compare the formulas with it."""

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from finetune.backend import Backend
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.predict import workload_of
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes import approximate
from finetune.planner.shapes.config_files import config_of, decoder_fields
from finetune.process import interpreter
from finetune.process.progress import progress
from finetune.process.quiet import OF_A_LAUNCH
from finetune.recipe import Recipe
from finetune.runs.run import write_json
from finetune.verification.memory import mesh_comparison, plan_and_trace
from finetune.verification.memory.mesh_comparison import Stages
from finetune.verification.memory.plan_and_trace import Verification

SIZES, TOKENS = (4, 8), 256
"""Numbers of layers, and of tokens, with which `measure_layers` traces."""


def verify(plan: Plan, workload: Workload | None = None) -> Verification | Stages:
    """Trace a step of the real model with fake tensors, and compare the formulas with it.

    The trace runs as rank 0 of the job if the engine supports it, for a pipeline as the first rank
    of both ends and of one stage between them, otherwise as the same work on one device.

    Args:
        workload: input of the formulas; None for a model without formulas.

    Raises:
        FinetuneError: the model cannot be traced, with the reason.
    """
    backend, recipe = plan.backend, plan.recipe
    if recipe.sampled is not None or recipe.teaches:
        needed = "sampled completions" if recipe.sampled is not None else "a teacher"
        raise FinetuneError(
            f"--verify: a step of {recipe.method} needs {needed}, which a trace does not have; "
            "verify a recipe of sft with the same model and rows"
        )
    if backend.shard_size is not None:
        raise FinetuneError(
            f"--verify: only one copy of {backend.name} could be traced; verify fsdp_full_shard or "
            "fsdp_shard_grad_op on the processes of a copy"
        )
    if plan.traits.divides:
        return _stages(plan, workload)
    sharded = plan.traits.traced and plan.processes > 1
    traced = plan if sharded else plan_and_trace.alone(plan)
    (steps,) = _rehearse(traced, [0], plan_and_trace.LAYERS)
    layers = plan_and_trace.layers_of(plan.recipe)
    offload = sharded and backend.offload != "none"
    found = plan_and_trace.extrapolate(steps, layers, plan.accumulation, offload)
    if workload is not None:
        images = steps[0]["image_tokens"]
        workload = plan_and_trace.as_traced(plan, workload, sharded, images)
    how = plan_and_trace.how(plan, sharded)
    return plan_and_trace.compare(
        found, workload, plan.processes, how, plan_and_trace.notes(plan, sharded)
    )


def measure_layers(recipe: Recipe) -> None:
    """Trace what a layer of a model without formulas saves, once; `approximate` reads it.

    If the model cannot be traced, nothing is added to what its approximation saves.
    """
    config = decoder_fields(config_of(recipe)[0])
    if approximate.is_traced(config):
        return
    recipe = recipe.with_batch(rows=1, micro_rows=1, max_length=TOKENS, packing=False)
    model = dataclasses.replace(recipe.model, activation_checkpointing=False)
    plan = Plan(dataclasses.replace(recipe, model=model), Backend("single", "single"), 1)
    approximate.keep(config, extra=0.0)
    with contextlib.suppress(FinetuneError):
        (steps,) = _rehearse(plan, [0], SIZES, forward=True)
        workload = workload_of(plan, approximate.approximate(config))
        few, more = (step["saved"] for step in steps)
        saved = (more - few) / (SIZES[1] - SIZES[0])
        known = traces(workload).kept_by(workload.shape.layers) / workload.shape.layers
        approximate.keep(config, extra=max(0.0, saved - known) / workload.tokens)


def _stages(plan: Plan, workload: Workload | None) -> Stages:
    """Trace one rank of both ends of a pipeline and of one stage between them."""
    stages = mesh_comparison.stages_of(plan)
    ranks = [mesh_comparison.rank_of(plan, stage) for stage in stages]
    traced = _rehearse(plan, ranks, mesh_comparison.LAYERS)
    count = plan_and_trace.layers_of(plan.recipe)
    if workload is not None:
        workload = plan_and_trace.as_traced(plan, workload, sharded=True)
    notes = plan_and_trace.notes(plan, sharded=True)
    found: dict[int, Verification] = {}
    for stage, steps in zip(stages, traced, strict=True):
        layers = mesh_comparison.layers_at(plan, stage, count)
        each = plan_and_trace.extrapolate(steps, layers, plan.accumulation, offload=False)
        found[stage] = mesh_comparison.compare(each, workload, plan, stage, notes)
    return Stages(found)


def _rehearse(
    plan: Plan, ranks: Sequence[int], layers: Sequence[int], forward: bool = False
) -> list[list[plan_and_trace.Step]]:
    """The traced steps of each rank, from processes that run as those of the plan's job.

    Args:
        forward: trace only a forward pass, for what layers save.
    """
    count = str(plan.processes)
    of_a_launch = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", *OF_A_LAUNCH)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(of_a_launch)}
    # Fake tensors are on the CPU; with a visible GPU, Accelerate would place some of them there.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if plan.processes > 1:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count}
        environment |= {"ACCELERATE_TORCH_DEVICE": "cpu"}  # not cpu:0, where no fake tensor is
        environment |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        asked = plan_and_trace.request(plan, ranks, layers)
        write_json(request, asked | {"forward": forward})
        command = interpreter.python(
            "-m", "finetune.verification.memory", str(request), str(answer)
        )
        with progress("tracing the steps"):
            done = subprocess.run(
                command, env=interpreter.environment(environment), capture_output=True, text=True,
                errors="replace", check=False,
            )  # fmt: skip
        result = json.loads(answer.read_text()) if answer.exists() else {}
    if "problems" in result:
        raise FinetuneError(*result["problems"])
    if "ranks" not in result:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise FinetuneError(f"--verify: the model cannot be traced: {last}")
    return result["ranks"]
