"""`finetune board`: watch, start, compare and try runs in a browser."""

import argparse
import os
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "watch, start, compare and try runs in a browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    runs PATH=runs  folder of runs, or one run; by default runs
    --host HOST=127.0.0.1  address to listen on
    --port PORT=7860  0 chooses a free port
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune.board.listen import serve

    root, name = arguments.runs, ""
    if (root / "recipe.json").is_file():
        root, name = root.resolve().parent, root.resolve().name
        here = Path.cwd()
        root = root.relative_to(here) if root.is_relative_to(here) else root
    if not root.is_dir() and root != Path("runs"):
        raise FinetuneError(f"{root}: no such folder; name the folder of the runs")
    serve(root, arguments.host, arguments.port, os.environ.get("FINETUNE_API_KEY"), name)
    return 0
