"""`finetune export`: write a run's result as a model that loads everywhere."""

import argparse
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError
from finetune.exporters import EXPORTERS

SUMMARY = "write a run's result as a model that loads everywhere"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--to", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--format", help=f"{', '.join(EXPORTERS)}, or module:function of your own exporter"
    )
    parser.add_argument("--merge", action="store_true", help="the same as --format merged")
    parser.add_argument(
        "--step", type=options.count, help="checkpoint, instead of the best or last one"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune.runs.run import open_run

    if arguments.merge and arguments.format not in (None, "merged"):
        raise FinetuneError(f"--merge: --format {arguments.format} is another; leave one away")
    run = open_run(arguments.run)
    from finetune.exporters.export import export

    options.without_bars()
    folder = export(run, arguments.to, arguments.merge, arguments.step, format=arguments.format)
    print(f"exported to {folder}")
    return 0
