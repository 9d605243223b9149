"""Rules of a recipe's data that need neither a backend nor a model."""

from collections.abc import Iterator

from finetune.recipe import Data, Recipe


def mixture(recipe: Recipe) -> Iterator[str]:
    """data.N.weight, data.N.repeat: they contradict each other; weigh every source, or none."""
    for section in ("data", "eval_data"):
        sources: tuple[Data, ...] = getattr(recipe, section)
        weighted = [data.weight is not None for data in sources]
        if not any(weighted):
            continue
        for number, data in enumerate(sources):
            if data.weight is None:
                yield (
                    f"{section}.{number}.weight: none, while {section}.{weighted.index(True)} has "
                    "one; give every source of the mixture a weight, or none of them"
                )
            elif data.repeat > 1:
                yield (
                    f"{section}.{number}.repeat: {data.repeat}, but the weights determine how much "
                    "of each source an epoch contains; remove one of the two"
                )


def overlong(recipe: Recipe) -> Iterator[str]:
    """batch.overlong: this method needs whole sequences; use drop or truncate."""
    if recipe.batch.overlong == "split" and recipe.takes != "prompts":
        if recipe.head.scored:
            why = "scores whole sequences"
        elif recipe.takes == "judged":
            why = "learns from the label of a whole answer"
        else:
            why = "compares the documents of a row, and pieces of them are not comparable"
        if "split" not in recipe.fits_rows_by:
            yield f"batch.overlong: split, but {recipe.method} {why}; use drop or truncate"


def prompts(recipe: Recipe) -> Iterator[str]:
    """batch.rows, reward_funcs: groups are sampled and scored; use whole groups and a reward."""
    batch = recipe.batch
    if recipe.takes != "prompts":
        return
    if batch.overlong in ("truncate", "split"):
        yield (
            f"batch.overlong: {batch.overlong}, but part of a prompt is a different request; use "
            "drop"
        )
    if batch.packing:
        yield (
            "batch.packing: true, but completions are sampled during training and concatenated by "
            "batch.padding_free; remove batch.packing"
        )
    yield from recipe.problems()


def streams(recipe: Recipe) -> Iterator[str]:
    """data.N.stream: what needs all rows before the first step; use max_steps, or data.N.first."""
    for number, data in enumerate(recipe.eval_data):
        if data.stream and data.first is None:
            yield f"eval_data.{number}.first: none, but an evaluation reads all rows; set it"
    if not recipe.streams:
        return
    several, cadences = len(recipe.data) > 1, (recipe.evaluation.every, recipe.saving.every)
    ahead = type(recipe).before_training is not Recipe.before_training
    ahead |= recipe.reads_reference or recipe.teaches or recipe.takes == "prompts"
    needs = {
        ("max_steps: none", "set it"): recipe.max_steps is None,
        ("evaluation.every, saving.every: in epochs", "give steps"): any(
            isinstance(each, str) for each in cadences
        ),
        (f"eval_rows: {recipe.eval_rows}", "use eval_data"): recipe.eval_rows is not None,
        ("duplicates: drop", "drop them in the files"): recipe.duplicates == "drop",
        ("data.weight: none", "weigh every source"): (
            several and any(data.weight is None for data in recipe.data)
        ),
        ("data.repeat: more than 1", "use weight"): any(data.repeat > 1 for data in recipe.data),
        ("data.split: a part", "use files of that part"): any(
            data.split != data.split_name for data in recipe.data
        ),
        (f"method: {recipe.method}", "use one without reference or sampling, such as orpo"): ahead,
    }
    for (got, instead), found in needs.items():
        if found:
            yield (
                f"{got}, but the rows of a stream are not known before training; {instead}, or set "
                "data.first on what streams"
            )


RULES = (mixture, overlong, prompts, streams)
"""Checks that commands without a plan make too (`inspect`, `teach`): they read data alone."""
