"""Train stages one after another, each from the result of the last, as one job.

CHAIN/
  chain.json     the stages: recipe and run of each
  1-sft/         the run of the first stage
  1-merged/      its result with the adapter merged, where the next stage needs a whole model
  2-dpo/
"""

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.launchers import QUEUES
from finetune.planner.plan import plan
from finetune.recipe import Recipe
from finetune.runs.foreign import begin
from finetune.runs.run import Run, refuse_scheme

OWN = ("config", "tokenizer", "revision")
"""Fields of a recipe's model that its stage's start replaces, besides its name."""


class Stage(NamedTuple):
    """A stage before it is trained."""

    word: str
    """Its recipe, as it was named."""
    recipe: Recipe
    run: Run


def stages(root: Path, words: list[str], overrides: list[str]) -> list[Stage]:
    """The stages of a chain; overrides are for all of them.

    Raises:
        FinetuneError: fewer than two recipes, or one that cannot be read.
    """
    if len(words) < 2:
        raise FinetuneError("--chain: name two recipes or more, in their order")
    recipes = [catalog.resolve(word, overrides) for word in words]
    return [
        Stage(word, recipe, Run(root / f"{number}-{Path(word).stem}"))
        for number, (word, recipe) in enumerate(zip(words, recipes, strict=True), 1)
    ]


def merges(before: Stage, after: Stage) -> bool:
    """Whether a stage starts from a merged model: it trains another adapter, or none."""
    return before.recipe.adapter is not None and before.recipe.adapter != after.recipe.adapter


def run(arguments: argparse.Namespace, launch: Callable[[argparse.Namespace], int]) -> int:
    """Train the stages of `finetune launch A B --chain NAME` that are not finished.

    Args:
        launch: trains one stage, by the arguments of `finetune launch`.

    Raises:
        FinetuneError: a stage cannot be trained, found before the first begins; or the folder has
            another chain, or this one and `--resume` is missing.
    """
    words = [arguments.recipe, *(word for word in arguments.overrides if "=" not in word)]
    overrides = [word for word in arguments.overrides if "=" in word]
    if arguments.launcher in QUEUES:
        raise FinetuneError(f"--chain: --launcher {arguments.launcher} does not wait for a stage")
    root = refuse_scheme(arguments.output or Path("runs") / arguments.chain)
    found = stages(root, words, overrides)
    model = found[0].recipe.model
    for stage in found:
        same = {name: getattr(model, name) for name in ("name", *OWN)}
        mine = dataclasses.replace(stage.recipe.model, **same)
        recipe = dataclasses.replace(stage.recipe, model=mine)
        processes = None if arguments.processes == "auto" else arguments.processes
        plan(recipe, arguments.backend, processes, arguments.precision)
    record = {"stages": [{"recipe": each.word, "run": each.run.root.name} for each in found]}
    begin(root, "chain", record, arguments.resume is not None, "--chain")
    status = 0
    for number, (stage, start) in enumerate(zip(found, _starts(root, found), strict=True), 1):
        print(f"stage {number} of {len(found)}: {stage.word}, in {stage.run.root}", flush=True)
        mine = copy.copy(arguments)
        mine.recipe, mine.overrides, mine.chain = stage.word, [*overrides, *start], None
        mine.output, mine.resume = stage.run.root, "auto"
        status = launch(mine)
        if status:
            break
    return status


def _starts(root: Path, found: list[Stage]) -> Iterator[list[str]]:
    """The overrides with which each stage starts from the result before it, which then exists."""
    yield []
    for number, (before, after) in enumerate(itertools.pairwise(found), 1):
        result = before.run.root
        if merges(before, after):
            result = root / f"{number}-merged"
            if not (result / "export.json").is_file():  # written last
                from finetune.exporters.export import export  # imports torch

                export(before.run, result, merge=True)
        yield [f"model.name={result}", *(f"model.{name}=null" for name in OWN)]
