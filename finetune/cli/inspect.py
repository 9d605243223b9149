"""`finetune inspect`: show rows as the model sees them, and which tokens are trained."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import options
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from finetune.recipe import Recipe

SUMMARY = "show rows as the model sees them, and which tokens are trained"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser, "name or file of a recipe, or data: a file, a folder, a hub name")
    table = """
    --model NAME  for data: the model that reads it, by hub name or folder
    --rows N=3  rows to show
    --completions N  for an online method: N completions of the initial model per row, with rewards
    --html PATH  page to write, instead of printing rows
    --json  print JSON
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune import catalog
    from finetune.checks.files import check_files
    from finetune.models import starting_adapter, starting_run

    if arguments.model is not None or _is_data(arguments.recipe):
        recipe = _recipe_of_data(arguments)
    else:
        recipe = catalog.resolve(arguments.recipe, arguments.overrides)
    recipe = starting_run.resolved(recipe)
    check_files(recipe)
    from finetune.reports import inspection

    if arguments.completions is None:
        found = inspection.inspect(recipe, arguments.rows)
    else:
        from finetune.training.online.first_samples import inspect_samples

        options.without_bars()
        recipe = starting_adapter.complete_adapter(recipe)
        found = inspect_samples(recipe, arguments.rows, arguments.completions)
    if arguments.model is not None:
        found.notes.insert(0, f"{arguments.recipe}: {_reading(recipe)}")
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    elif arguments.html is not None:
        inspection.write_page(found, Path(arguments.recipe).stem, arguments.html)
        print(f"wrote {arguments.html}")
    else:
        inspection.show(found, inspection.Console())
    return 0


def _is_data(word: str) -> bool:
    """Whether a word without `--model` names data: an existing path that is not a recipe.

    A `.json` file may be either: a recipe is an object, and data in `.json` is mostly a list.
    """
    from finetune import catalog

    path = Path(word)
    if word in catalog.names() or path.suffix in (".py", ".yaml", ".yml") or not path.exists():
        return False
    if path.suffix != ".json":
        return True
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _recipe_of_data(arguments: argparse.Namespace) -> "Recipe":
    from finetune.reports.inspection import recipe_of_data

    source = arguments.recipe
    if arguments.completions is not None:
        raise FinetuneError(f"--completions: {source} is data; name a recipe of an online method")
    recipe = recipe_of_data(source, arguments.model, arguments.overrides)
    if arguments.model is None:
        raise FinetuneError(
            f"{source}: {_reading(recipe)}; its tokens depend on the model: add --model NAME, a "
            "hub name or a folder"
        )
    return recipe


def _reading(recipe: "Recipe") -> str:
    """How data is read, as text."""
    (data,) = recipe.data
    columns = f" with columns={json.dumps(data.columns)}" if data.columns else ""
    return f"read with format '{data.format}'{columns} and method '{recipe.method}'"
