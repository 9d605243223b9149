"""`finetune prove`: check that training is equivalent on every backend."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import options
from finetune.errors import FinetuneError
from finetune.process.signals import handled_signals

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.recipe import Recipe
    from finetune.verification.proofs.proof import Proof

SUMMARY = "check that training is equivalent on every backend"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    parser.add_argument(
        "--backends",
        help="comma-separated names or files, or all except those that divide a model; by default "
        "the recipe's",
    )
    parser.add_argument(
        "--processes", type=options.count, default=2, help="processes of each sharded run"
    )
    parser.add_argument(
        "--steps", type=options.count, default=10, help="optimizer steps to compare"
    )
    parser.add_argument("--like-mine", action="store_true", help="use the recipe's own batch")
    parser.add_argument("--bf16", action="store_true", help="run in bf16 instead of fp32")
    parser.add_argument(
        "--full", action="store_true", help="use the real model instead of a small one"
    )
    parser.add_argument(
        "--kinds", default="own", help="lora,qlora,full instead of what the recipe trains"
    )
    parser.add_argument(
        "--crossings",
        choices=("each", "ring", "all"),
        default="each",
        help="which checkpoints are resumed on other backends; all is between every two",
    )
    parser.add_argument("--jobs", type=options.count, default=1, help="concurrent launches")
    parser.add_argument(
        "--output", type=options.local_path, help="folder; by default proofs/RECIPE"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


class Ended(BaseException):
    """Raised on a signal, with its number."""


def run(arguments: argparse.Namespace) -> int:
    """Run a proof and print it; returns the exit status: 0 if every check passed, otherwise 1.

    A signal ends every process that was started; the status is then 128 plus its number.
    """
    from finetune import catalog
    from finetune.models.starting_run import resolved

    recipe = resolved(catalog.resolve(arguments.recipe, arguments.overrides))
    if recipe.model.adapter is not None:
        raise FinetuneError("model.adapter: a proof starts from a new adapter; set it to null")

    def end(number: int, _: object) -> None:
        raise Ended(number)

    # A script's background job would ignore SIGINT.
    before = {number: signal.signal(number, end) for number in handled_signals()}
    try:
        return _prove(arguments, recipe)
    except Ended as ended:
        (number,) = ended.args
        print(f"interrupted by {signal.Signals(number).name}: nothing was proved", file=sys.stderr)
        return 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prove(arguments: argparse.Namespace, recipe: "Recipe") -> int:
    from rich.console import Console

    from finetune.reports.proof_page import read_proof
    from finetune.verification.proofs.prove import prove

    console = Console(stderr=arguments.json)
    output = arguments.output or Path("proofs") / Path(arguments.recipe).stem
    proof = prove(
        recipe,
        arguments.backends,
        arguments.processes,
        arguments.steps,
        output,
        bf16=arguments.bf16,
        like_mine=arguments.like_mine,
        full=arguments.full,
        kinds=arguments.kinds,
        crossings=arguments.crossings,
        jobs=arguments.jobs,
        console=console,
    )
    if arguments.json:
        print(json.dumps(read_proof(output / "proof.json"), indent=2))
    else:
        _print(proof, read_proof(output / "proof.json"), output, console)
    return 0 if proof.proved else 1


def _print(proof: "Proof", record: dict[str, Any], output: Path, console: "Console") -> None:
    """Print the table of all pairs, failed and refused ones, and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    from finetune.reports.proof_page import KINDS, overview

    table = overview(record)
    drawn = Table(*table.columns)
    for row in table.rows:
        drawn.add_row(*(f"[bold red]{cell}[/]" if cell == "NO" else str(cell) for cell in row))
    console.print(drawn)
    for check in proof.failures:
        where = f"{KINDS[check.kind]} on {check.backend}, {check.name}"
        console.print(f"[red]failed[/]  {where}: {escape(check.summary)}", highlight=False)
    for refused in proof.refused:
        word = "not possible here:" if refused.missing else "refused:"
        where = f"{KINDS[refused.kind]} on {refused.backend}"
        console.print(f"[dim]{word} {where}: {escape(refused.reason)}[/]", highlight=False)
    colour = "green" if proof.proved else "red"
    console.print(f"[bold {colour}]{proof.verdict}[/]", highlight=False)
    console.print(f"{output / 'proof.html'} has every number", highlight=False)
