"""Propose micro-batches by tokens where memory holds more rows than a forward pass is given."""

import dataclasses
import math

from finetune.planner.estimate import advice
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan

ENOUGH_TOKENS = 16_384
"""Tokens of a forward pass beyond which nothing is proposed: an estimate, that matrix products of
so many rows are as fast as they get."""


def micro_tokens(plan: Plan, workload: Workload, machine: Machine) -> int | None:
    """A `batch.micro_tokens` that fits with room to spare and spares forward passes; else None."""
    batch = plan.recipe.batch
    if batch.micro_tokens is not None or plan.accumulation == 1:
        return None
    rows = math.ceil(batch.rows / plan.processes)
    for count in range(min(rows, ENOUGH_TOKENS // batch.max_length), batch.micro_rows, -1):
        wider = dataclasses.replace(workload, rows=count, accumulation=math.ceil(rows / count))
        if advice.option(wider, machine).status == "safe":
            return count * batch.max_length
    return None
