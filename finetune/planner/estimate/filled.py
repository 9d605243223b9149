"""Propose `batch.micro_tokens` if memory has room for more rows per forward pass."""

import math

from finetune.planner.estimate import advice
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan

ENOUGH_TOKENS = 16_384
"""Maximum tokens per forward pass of a proposal: an estimate of where larger matrix products are
not faster."""


def micro_tokens(plan: Plan, workload: Workload, machine: Machine) -> int | None:
    """A `batch.micro_tokens` that safely fits and saves forward passes; None if there is none."""
    batch, length = plan.recipe.batch, plan.recipe.row_length
    if batch.micro_tokens is not None or plan.accumulation == 1:
        return None
    rows = math.ceil(batch.rows / plan.processes)
    for count in range(min(rows, ENOUGH_TOKENS // length), batch.micro_rows, -1):
        wider = workload.with_micro_rows(count, math.ceil(rows / count))
        if advice.option(wider, machine).status == "safe":
            return count * length
    return None
