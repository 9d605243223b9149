"""`finetune quickstart`: run the main job offline, in minutes on a CPU."""

import argparse
from pathlib import Path

from finetune.cli import options

SUMMARY = "run the main job offline, in minutes on a CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", choices=("sft", "dpo", "grpo"), default="sft", help="training method"
    )
    parser.add_argument(
        "--output", type=options.local_path, help="by default runs/quickstart[-METHOD]"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune.quickstart.online import quickstart_grpo
    from finetune.quickstart.preference import quickstart_dpo
    from finetune.quickstart.supervised import quickstart

    if arguments.method == "dpo":
        quickstart_dpo(arguments.output or Path("runs/quickstart-dpo"))
    elif arguments.method == "grpo":
        quickstart_grpo(arguments.output or Path("runs/quickstart-grpo"))
    else:
        quickstart(arguments.output or Path("runs/quickstart"))
    return 0
