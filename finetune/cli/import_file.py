"""`finetune import`: convert a config file of another toolkit to a recipe."""

import argparse
from pathlib import Path

from finetune.cli import options

SUMMARY = "convert a config file of axolotl or LLaMA-Factory to a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="YAML of axolotl or LLaMA-Factory")
    parser.add_argument("--output", help="name or .yaml to write; by default the file's name")
    parser.add_argument(
        "--processes", type=options.count, default=1, help="number of processes it is for"
    )
    parser.add_argument(
        "--allow-lost",
        action="store_true",
        help="write the recipe even if a key has no counterpart",
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune import importers

    return importers.run(
        arguments.file, arguments.output, arguments.processes, arguments.allow_lost
    )
