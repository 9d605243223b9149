"""Choose a backend for a recipe on a machine, with its micro-batch and recomputation."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, hardware, mesh_sizes
from finetune.planner.estimate.judges import leaving_room
from finetune.planner.estimate.layout import of_backend
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.row_counts import average_tokens
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import plan
from finetune.planner.request import requested
from finetune.planner.rules import incompatibilities
from finetune.recipe import Recipe

SIZES = (1, 2, 4, 8, 16, 32)
"""Rows of a micro-batch to try."""


def on(machine: hardware.Machine, name: str, shard_size: int | None = None) -> backends.Backend:
    """A backend with its shard size on a machine."""
    return backends.sized(backends.load(name), machine.count, machine.nodes, shard_size)


def candidates(
    recipe: Recipe,
    machine: hardware.Machine,
    precision: backends.Precision = "bf16",
    divided: bool = True,
    cpu: bool = False,
    row_tokens: int | None = None,
) -> list[advice.Option]:
    """Every layout, micro-batch and recomputation for a recipe.

    Args:
        divided: also divide the model among the GPUs.
        cpu: the machine is `hardware.processor`.
        row_tokens: average number of tokens per row.

    Raises:
        FinetuneError: the shape of the model is unknown, or a step has too few rows for the GPUs.
    """
    alone, shape = _one_process(recipe), model_source(recipe).shape
    machine = leaving_room(machine, recipe)
    row_tokens = average_tokens(recipe, row_tokens)
    base = workload_of(plan(alone, "single", 1, precision), shape, row_tokens)
    if cpu:
        base = dataclasses.replace(base, cpu=True, chained=recipe.kernels.pointwise != "eager")
    found = advice.options(
        base,
        machine,
        precision,
        rows_per_step=recipe.batch.rows,
        micro_rows=[rows for rows in SIZES if recipe.batch.rows % rows == 0],
        divided=_divisions(recipe, base, machine, precision, row_tokens) if divided else (),
    )
    if not found:
        raise FinetuneError(_too_few_rows(recipe, machine))
    return found


def allowed(
    recipe: Recipe, ranked: list[advice.Option], precision: backends.Precision
) -> list[advice.Option]:
    """The ranking without options that the rules forbid, and layouts that have no backend."""
    known, kept = backends.names(), list[advice.Option]()
    for option in ranked:
        layout = option.workload.layout
        backend = backends.Backend(
            layout.name, layout.engine, layout.shard, layout.offload, layout.device, precision,
            axes=layout.axes,
        )  # fmt: skip
        changed = recipe.with_batch(micro_rows=option.workload.micro_rows)
        if layout.name in known and not incompatibilities(
            requested(changed, backend, layout.processes)
        ):
            kept.append(option)
    return kept


def backend_of(
    option: advice.Option, machine: hardware.Machine, precision: backends.Precision
) -> backends.Backend:
    """The backend of an option, with its axes."""
    axes = option.workload.layout.axes
    found = on(machine, option.name)
    if axes.any:
        found, _ = backends.divided(found, machine.count, axes.sizes)
    return dataclasses.replace(found, precision=precision)


def chosen(recipe: Recipe, option: advice.Option) -> tuple[Recipe, list[str]]:
    """The recipe with an option's micro-batch and recomputation, and the words that select it."""
    rows, recompute = option.workload.micro_rows, option.workload.checkpointing
    words = [f"--{axis} {size}" for axis, size in option.workload.layout.axes.sizes.items()]
    words.append(f"batch.micro_rows={rows}")
    if recipe.batch.micro_tokens is not None:
        words.append("batch.micro_tokens=null")
    model = recipe.model
    if recompute != model.checkpointing:
        kept: bool | Literal["attention"] = (
            "attention" if recompute == "attention" else recompute == "full"
        )
        model = dataclasses.replace(model, activation_checkpointing=kept)
        words.append(f"model.activation_checkpointing={str(kept).lower()}")
    batched = recipe.with_batch(micro_rows=rows, micro_tokens=None)
    return dataclasses.replace(batched, model=model), words


def _divisions(
    recipe: Recipe,
    workload: Workload,
    machine: hardware.Machine,
    precision: backends.Precision,
    row_tokens: int | None,
) -> Iterator[Workload]:
    """Workloads of the recipe under every layout that divides its model and the rules allow."""
    alone, made = _one_process(recipe), dict[str, Workload]()
    for backend in mesh_sizes.candidates(workload.shape, machine, precision):
        if incompatibilities(requested(alone, backend, machine.count)):
            continue
        if backend.name not in made:  # the choice of kernels does not depend on the sizes
            planned = plan(alone, backend, machine.count)
            made[backend.name] = workload_of(planned, workload.shape, row_tokens)
        place = of_backend(backend, machine.count)
        yield dataclasses.replace(made[backend.name], layout=place)


def _one_process(recipe: Recipe) -> Recipe:
    """The recipe with micro-batches of one row, which divide any batch."""
    return recipe.with_batch(micro_rows=1, micro_tokens=None)


def _too_few_rows(recipe: Recipe, machine: hardware.Machine) -> str:
    rows = max(1, recipe.batch.rows // machine.count) * machine.count
    return (
        f"batch.rows: {recipe.batch.rows} rows cannot be divided among {machine.count} GPUs; use "
        f"batch.rows={rows}"
    )
