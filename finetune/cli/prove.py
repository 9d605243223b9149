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
    table = """
    --backends NAMES  names or files with commas between, or all but those that divide a model
    --processes N=2  processes of each sharded run
    --steps N=10  optimizer steps to compare
    --like-mine  use the recipe's own batch
    --bf16  run in bf16 instead of fp32
    --full  use the real model instead of a small one
    --kinds KINDS=own  lora,qlora,full instead of what the recipe trains
    --crossings each|ring|all=each  which checkpoints others resume; all is between every two
    --jobs N=1  concurrent launches
    --output PATH  folder; by default proofs/RECIPE
    --json  print JSON
    """
    options.add(parser, table)


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
