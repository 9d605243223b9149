"""Options that several verbs of the command line share, and the types of their values."""

import argparse
import contextlib
from pathlib import Path


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a whole number of at least 1")
    return int(text)


def minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"got '{text}', expected minutes, such as 30 or 0.5")


def recipe_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="name or file of a recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=1e-4"
    )


def backend_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", help="name or YAML; by default the recipe's")
    parser.add_argument("--processes", type=count, help="by default the backend's")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="instead of the backend's")


def run_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="run directory; by default runs/RECIPE")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        choices=("yes", "auto"),
        metavar="auto",
        help="continue from the newest checkpoint; `--resume auto` starts where there is none",
    )
    parser.add_argument("--nvme-path", type=Path, help="local disk for zero3_nvme")
    parser.add_argument(
        "--timeout", type=minutes, default=30.0, help="minutes a rank waits for others"
    )
    parser.add_argument(
        "--profile", action="store_true", help="trace the third step, and say where it went"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw no loss.png at the end")


def proof_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", help="names with commas, or all; by default the recipe's")
    parser.add_argument("--processes", type=count, default=2, help="of each sharded run")
    parser.add_argument("--steps", type=count, default=10, help="optimizer steps compared")
    parser.add_argument("--like-mine", action="store_true", help="the recipe's own batch")
    parser.add_argument("--bf16", action="store_true", help="in bf16 instead of fp32")
    parser.add_argument("--full", action="store_true", help="the real model instead of a small one")
    parser.add_argument("--kinds", default="own", help="lora,qlora,full instead of the recipe's")
    parser.add_argument("--pairs", action="store_true", help="resume between every two backends")
    parser.add_argument("--jobs", type=count, default=1, help="launches at a time")
    parser.add_argument("--output", type=Path, help="folder; by default proofs/RECIPE")
    parser.add_argument("--json", action="store_true", help="print JSON")
