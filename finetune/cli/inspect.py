"""`finetune inspect`: show rows as the model sees them, and which tokens are trained."""

import argparse
import dataclasses
import json
from pathlib import Path

from finetune.cli import options

SUMMARY = "show rows as the model sees them, and which tokens are trained"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    parser.add_argument("--rows", type=options.count, default=3, help="rows to show")
    parser.add_argument(
        "--completions",
        type=options.count,
        metavar="N",
        help="for an online method: N completions of the initial model per row, with rewards",
    )
    parser.add_argument("--html", type=Path, help="page to write, instead of printing rows")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from finetune import catalog
    from finetune.models.starting_run import resolved
    from finetune.training.preflight import check_files, read_words

    recipe = resolved(catalog.resolve(arguments.recipe, arguments.overrides))
    check_files(recipe)
    from finetune.reports import inspection

    if arguments.completions is None:
        found = inspection.inspect(recipe, arguments.rows)
    else:
        from finetune.training.first_samples import inspect_samples

        options.without_bars()
        recipe = read_words(arguments.recipe, arguments.overrides, None)
        found = inspect_samples(recipe, arguments.rows, arguments.completions)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    elif arguments.html is not None:
        inspection.write_page(found, Path(arguments.recipe).stem, arguments.html)
        print(f"wrote {arguments.html}")
    else:
        inspection.show(found, inspection.Console())
    return 0
