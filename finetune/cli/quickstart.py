"""`finetune quickstart`: run the main job offline, in minutes on a CPU."""

import argparse
import importlib.util
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError
from finetune.version import install

SUMMARY = "run the main job offline, in minutes on a CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        choices=("sft", "dpo", "grpo", "images"),
        default="sft",
        help="training method, or images: supervised, with pictures",
    )
    parser.add_argument(
        "--output", type=options.local_path, help="by default runs/quickstart[-METHOD]"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune.quickstart.online import quickstart_grpo
    from finetune.quickstart.preference import quickstart_dpo
    from finetune.quickstart.supervised import quickstart

    if arguments.method == "images":
        if importlib.util.find_spec("PIL") is None:
            raise FinetuneError(f"--method images needs Pillow: {install('images')}")
        from finetune.quickstart.pictures import quickstart_images

        quickstart_images(arguments.output or Path("runs/quickstart-images"))
    elif arguments.method == "dpo":
        quickstart_dpo(arguments.output or Path("runs/quickstart-dpo"))
    elif arguments.method == "grpo":
        quickstart_grpo(arguments.output or Path("runs/quickstart-grpo"))
    else:
        quickstart(arguments.output or Path("runs/quickstart"))
    return 0
