"""`finetune compare`: compare several runs."""

import argparse

from finetune.cli import options

SUMMARY = "compare runs: recipes, curves, measures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    runs RUN+  run directories, two or more
    --output PATH=comparison.html  page to write
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune.reports.comparison import compare, page, terminal
    from finetune.runs.run import write_whole

    found = compare(arguments.runs)
    print("\n".join(terminal(found)))
    write_whole(arguments.output, page(found))
    print(f"page       {arguments.output}")
    return 0
