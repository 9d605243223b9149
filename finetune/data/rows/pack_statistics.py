"""Measure the share of token slots that are not padding, and suggest how to raise it."""

import numpy as np

from finetune.data.rows.order import rows_of_step, split_rows
from finetune.data.rows.store import Rows
from finetune.planner.padding import Padding
from finetune.recipe import Recipe

ENOUGH = 0.9
"""Share of real tokens from which no note is given."""
STEPS = 100
"""Maximum number of steps that are counted, from the first."""


def real_share(rows: Rows, recipe: Recipe, steps: int, micro_tokens: int | None = None) -> float:
    """Share of real tokens among the token slots of a run's first steps, with padded rows.

    Args:
        rows: Training rows.
        recipe: Recipe of the run.
        steps: Number of steps of the run.
        micro_tokens: Maximum token slots per micro-batch, instead of the recipe's setting.
    """
    batch = recipe.batch
    real, slots = 0, 0
    for step in range(min(steps, STEPS)):
        chosen = rows_of_step(step, len(rows), batch.rows, recipe.seed)
        limit = batch.micro_tokens if micro_tokens is None else micro_tokens
        for micro_batch in split_rows(chosen, rows.slots, batch.micro_rows, limit):
            widths = rows.slots[micro_batch]
            real += int(rows.lengths[micro_batch].sum())
            slots += len(widths) * int(np.max(widths))
    return real / slots


def filling_notes(rows: Rows, recipe: Recipe, padding: Padding, steps: int) -> list[str]:
    """Suggest how to reduce padding; empty if at least `ENOUGH` of the slots are real tokens."""
    if padding.free:
        return []
    share = real_share(rows, recipe, steps)
    if share >= ENOUGH:
        return []
    message = f"batch: {share:.0%} of the token slots are tokens, the others are padding"
    if padding.instead:
        return [f"{message}; {padding.instead} concatenates rows without padding"]
    batch = recipe.batch
    if batch.micro_tokens is None:
        better = real_share(rows, recipe, steps, recipe.row_length)
        if better >= ENOUGH:
            return [
                f"{message}; batch.micro_tokens={recipe.row_length} raises this share to "
                f"{better:.0%}"
            ]
    return [f"{message}; batch.micro_rows=1 fills them, one row in each forward pass"]
