"""Count the share of token slots that are real, and say what would fill the others."""

import numpy as np

from finetune.data.order import cut, rows_of_step
from finetune.data.store import Rows
from finetune.planner.padding import Padding
from finetune.recipe import Recipe

ENOUGH = 0.9
"""Share of real tokens from which nothing is said."""
STEPS = 100
"""First steps that are counted, at most."""


def real_share(rows: Rows, recipe: Recipe, steps: int, micro_tokens: int | None = None) -> float:
    """Real tokens over token slots of the first steps of a run whose rows are padded.

    Args:
        rows: Of the training.
        recipe: Of the training.
        steps: Of the whole run.
        micro_tokens: Instead of the recipe's micro-batch.
    """
    batch = recipe.batch
    real, slots = 0, 0
    for step in range(min(steps, STEPS)):
        chosen = rows_of_step(step, len(rows), batch.rows, recipe.seed)
        limit = batch.micro_tokens if micro_tokens is None else micro_tokens
        for micro_batch in cut(chosen, rows.lengths, batch.micro_rows, limit):
            lengths = rows.lengths[micro_batch]
            real += int(lengths.sum())
            slots += len(lengths) * int(np.max(lengths))
    return real / slots


def filling_notes(rows: Rows, recipe: Recipe, padding: Padding, steps: int) -> list[str]:
    """What would fill the token slots of padded rows; nothing where they are full enough."""
    if padding.free:
        return []
    share = real_share(rows, recipe, steps)
    if share >= ENOUGH:
        return []
    told = f"batch: {share:.0%} of the token slots are real, the others are padding"
    if padding.instead:
        return [f"{told}; {padding.instead} lays rows side by side, without padding"]
    batch = recipe.batch
    if batch.micro_tokens is None:
        better = real_share(rows, recipe, steps, batch.max_length)
        if better >= ENOUGH:
            return [
                f"{told}; batch.micro_tokens={batch.max_length} makes {better:.0%} of them real"
            ]
    return [f"{told}; batch.micro_rows=1 fills them, one row in each forward pass"]
