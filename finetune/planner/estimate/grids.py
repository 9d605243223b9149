"""Estimate a recipe on a tensor x pipeline x data parallel layout by arithmetic."""

import dataclasses
from typing import Any

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.planner.estimate import page
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.parallelism import (
    Grid,
    GridMemory,
    bubble,
    check,
    grid_memory,
)
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.timing import attained, flops_per_token
from finetune.planner.plan import plan
from finetune.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class GridPlan:
    """Estimated memory and time of a recipe on a grid of GPUs."""

    grid: Grid
    machine: Machine
    memory: GridMemory
    """Memory of a GPU in the first pipeline stage, where it is largest."""
    microbatches: int
    """Micro-batches per pipeline and step."""
    bubble: float
    """Fraction of a step in which a stage is idle."""
    compute: float
    """Seconds per step, including the bubble and excluding communication."""
    source: str
    """Where the model's shape was read from."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.machine.usable

    def summary(self) -> dict[str, Any]:
        """Plain values, in bytes and seconds, for JSON."""
        return {
            "grid": dataclasses.asdict(self.grid),
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "usable": self.machine.usable,
            "fits": self.fits,
            "microbatches": self.microbatches,
            "bubble": self.bubble,
            "compute_seconds": self.compute,
            "source": self.source,
        }

    def page(self) -> str:
        """The estimate as text."""
        held, fits = self.memory, "fits" if self.fits else "DOES NOT FIT"
        usable = page.size(self.machine.usable)
        return "\n".join(
            [
                f"{self.grid.name} on {page.machine_words(self.machine)}: {fits}",
                f"  memory   {page.size(held.total)} of {usable} usable on a GPU of the "
                f"first stage: states {page.size(held.states)}, activations "
                f"{page.size(held.activations)}, logits {page.size(held.logits)}",
                f"  bubble   {self.bubble:.1%} of a step: {self.grid.pipeline} stages, "
                f"{self.microbatches} micro-batches each",
                f"  compute  {page.duration(self.compute)} a step with it, at "
                f"{self.machine.gpu.mfu:.0%} of the peak (an assumption), communication left out",
                f"  shapes   from {self.source}",
                "  note     arithmetic of a layout with ZeRO-1 "
                "over the data parallel groups; docs/parallelism.md has the backends",
            ]
        )


def plan_grid(
    recipe: Recipe,
    machine: Machine,
    tensor: int,
    pipeline: int,
    precision: backends.Precision = "bf16",
) -> GridPlan:
    """Estimate a recipe with weights split over `tensor` GPUs and layers over `pipeline` stages.

    The remaining GPUs of the machine are data parallel, with the optimizer sharded (ZeRO-1).

    Raises:
        FinetuneError: the layout is impossible (with every reason and the numbers), or the recipe
            trains an adapter.
    """
    if recipe.adapter is not None:
        raise FinetuneError(
            "--tensor, --pipeline: this estimate covers training all weights, and the recipe "
            "trains an adapter; use adapter=null"
        )
    if tensor < 1 or pipeline < 1:
        raise FinetuneError(
            f"--tensor {tensor}, --pipeline {pipeline}: expected whole numbers of at least 1"
        )
    alone = recipe.with_batch(rows=recipe.most_micro_rows)
    source = model_source(recipe)
    workload = workload_of(plan(alone, "single", 1, precision), source.shape)
    grid = Grid(tensor, pipeline, max(1, machine.count // (tensor * pipeline)))
    check(grid, workload.shape, machine.count, machine.per_node, machine.fast)
    taken = grid.data * workload.micro_rows
    if recipe.batch.rows % taken:
        raise FinetuneError(
            f"batch.rows: {recipe.batch.rows} rows do not divide into {grid.data} data parallel "
            f"groups x micro-batches of {workload.micro_rows}; use a multiple of {taken}"
        )
    count = recipe.batch.rows // taken
    waits = bubble(pipeline, count)
    work = count * workload.tokens * grid.data
    per_token = flops_per_token(
        workload.shape, workload.length, recompute=workload.checkpointing != "none"
    )
    rate = machine.count * attained(machine, workload)
    given = (grid, workload.shape, workload.rows, workload.length, count, traces(workload).kept)
    return GridPlan(
        grid,
        machine,
        grid_memory(*given),
        count,
        waits,
        work * per_token / rate / (1 - waits),
        source.where,
    )
