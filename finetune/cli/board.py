"""`finetune board`: watch, start, compare and try runs in a browser."""

import argparse
import os
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "watch, start, compare and try runs in a browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="?", type=options.local_path, default=Path("runs"),
        help="folder of runs, or one run; by default runs",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=options.port, default=7860, help="0 chooses a free port")


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
