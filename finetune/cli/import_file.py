"""`finetune import`: convert a config file of another toolkit to a recipe."""

import argparse

from finetune.cli import options

SUMMARY = "convert a configuration of another toolkit to a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        metavar="FILE",
        help="a configuration of axolotl, LLaMA-Factory, TRL, ms-swift, torchtune or Trainer; a "
        "script with a command of TRL or ms-swift; or the command itself after --",
    )
    table = """
    --output NAME  name or .yaml to write; by default the file's name
    --processes N  number of processes it is for
    --allow-lost  write the recipe even if a key has no counterpart
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune import importers

    return importers.run(
        arguments.source, arguments.output, arguments.processes, arguments.allow_lost
    )
