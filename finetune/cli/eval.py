"""`finetune eval`: exact match of a model's greedy answers."""

import argparse
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "exact match of a model's greedy answers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="run directory, folder with a model, or hub name")
    parser.add_argument("--rows-of", help="run whose held-out rows are asked")
    parser.add_argument("--data", help="data file, instead of held-out rows of a run")
    parser.add_argument("--format", default="messages", help="format of --data")
    parser.add_argument("--limit", type=options.count, default=200, help="rows, evenly spaced")
    parser.add_argument("--max-new-tokens", type=options.count, default=256)
    parser.add_argument("--samples", type=Path, help="JSONL file to write with every answer")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from finetune.runs.run import open_run

    if arguments.rows_of is not None:
        open_run(arguments.rows_of)
    elif arguments.data is None and not (Path(arguments.model) / "recipe.json").is_file():
        raise FinetuneError(
            f"{arguments.model}: not a run directory (it has no recipe.json); for another model "
            "give --rows-of RUN, or --data FILE and --format"
        )
    from finetune.evaluation import evaluation

    options.without_bars()
    evaluation.run(arguments)
    return 0
