"""`finetune quickstart`: run the main job offline, in minutes on a CPU."""

import argparse
import importlib.util
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError
from finetune.version import install

METHODS = {
    "sft": "supervised:quickstart", "dpo": "preference:quickstart_dpo",
    "grpo": "online:quickstart_grpo", "images": "pictures:quickstart_images",
}  # fmt: skip
SUMMARY = "run the main job offline, in minutes on a CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = f"""
    --method {"|".join(METHODS)}=sft  training method, or images: supervised, with pictures
    --output PATH  by default runs/quickstart[-METHOD]
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    method = arguments.method
    if method == "images" and importlib.util.find_spec("PIL") is None:
        raise FinetuneError(f"--method images needs Pillow: {install('images')}")
    module, function = METHODS[method].split(":")
    work = getattr(importlib.import_module(f"finetune.quickstart.{module}"), function)
    work(arguments.output or Path(f"runs/quickstart{'' if method == 'sft' else f'-{method}'}"))
    return 0
