"""Count the rows of a recipe's data and the steps of a run."""

import dataclasses
import math
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.planner.plan import Plan
from finetune.planner.shapes import published
from finetune.recipe import Recipe

LETTERS = 4
"""Average characters of English text per token."""


def steps_of(plan: Plan, rows: int | None, row_tokens: int | None = None) -> int | None:
    """Steps of a run on a data set with `rows` rows; None if they cannot be determined."""
    recipe = plan.recipe
    if recipe.max_steps is not None:
        return recipe.max_steps
    if rows is None or not recipe.batch.packing:
        return None if rows is None else plan.steps(rows)
    each = average_tokens(recipe, row_tokens)
    if each is None:
        return None
    # Best-fit packing leaves about 1 % of a pack empty if rows are short; ignored here.
    return plan.steps(math.ceil(rows * each / recipe.row_length))


def average_tokens(recipe: Recipe, given: int | None) -> int | None:
    """Average tokens of a training row: as given, of a known data set, or of local files.

    None if it is not known, and for rows that are sampled.

    Raises:
        FinetuneError: rows cannot be that long.
    """
    if recipe.sampled is not None:
        return None
    if given is not None and given > recipe.row_length:
        raise FinetuneError(
            f"--row-tokens {given}: rows have at most batch.max_length={recipe.batch.max_length} "
            f"tokens{' a document' if recipe.row_length > recipe.batch.max_length else ''}; give "
            "the average after cutting, or a longer batch.max_length"
        )
    found = given or known_row_tokens(recipe)
    return None if found is None else min(found, recipe.row_length)


def known_row_tokens(recipe: Recipe) -> int | None:
    """Average tokens per row: of a published data set, or estimated from local JSONL files."""
    if len(recipe.data) == 1 and recipe.data[0].source in published.ROW_TOKENS:
        return published.ROW_TOKENS[recipe.data[0].source]
    rows = local_rows(dataclasses.replace(recipe, eval_rows=None))
    if rows is None:
        return None
    total_bytes = sum(Path(data.source).stat().st_size for data in recipe.data)
    lines = sum(_lines(Path(data.source)) for data in recipe.data)
    return max(1, round(total_bytes / lines / LETTERS))


def held_out_rows(recipe: Recipe, rows: int | None) -> int | None:
    """Rows of an evaluation, for `rows` training rows; None if they are not known."""
    if recipe.eval_data:
        return local_rows(dataclasses.replace(recipe, data=recipe.eval_data, eval_rows=None))
    if isinstance(recipe.eval_rows, float):
        share = recipe.eval_rows
        return None if rows is None else round(rows * share / (1 - share))
    return recipe.eval_rows


def _lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def local_rows(recipe: Recipe) -> int | None:
    """Rows of a recipe's data, counted by lines; None unless all is local JSONL, and no stream."""
    total = 0
    for data in recipe.data:
        path = Path(data.source)
        if data.stream or path.suffix != ".jsonl" or not path.is_file():
            return None
        rows = _lines(path)
        total += min(rows, data.first or rows) * data.repeat
    return total - recipe.held_out(total) if total else None
