"""`finetune compare`: compare several runs."""

import argparse
from pathlib import Path

from finetune.cli import options

SUMMARY = "compare runs: recipes, curves, measures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=options.run_word, nargs="+", metavar="run", help="run directories, two or more"
    )
    parser.add_argument(
        "--output", type=options.local_path, default=Path("comparison.html"), help="page to write"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune.reports.comparison import compare, page, terminal
    from finetune.runs.run import write_whole

    found = compare(arguments.runs)
    print("\n".join(terminal(found)))
    write_whole(arguments.output, page(found))
    print(f"page       {arguments.output}")
    return 0
