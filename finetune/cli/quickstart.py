"""`finetune quickstart`: the main job, offline, in minutes on a CPU."""

import argparse
from pathlib import Path

SUMMARY = "the main job, offline, in minutes on a CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))


def run(arguments: argparse.Namespace) -> int:
    from finetune.quickstart.job import quickstart

    quickstart(arguments.output)
    return 0
