"""`finetune prove` for a person: progress while it runs, then the verdict."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from finetune import backend as known
from finetune.cache import cache
from finetune.errors import FinetuneError
from finetune.process.signals import heeded
from finetune.recipe import Recipe
from finetune.reports.proof_page import KINDS, overview, read_proof
from finetune.verification.proofs.job import carry_out
from finetune.verification.proofs.matrix import Request
from finetune.verification.proofs.proof import Proof
from finetune.verification.proofs.small_recipe import Kind, Shape


def prove(
    recipe: Recipe,
    backends: str | None = None,
    processes: int = 2,
    steps: int = 10,
    output: str | Path = "proofs/latest",
    *,
    bf16: bool = False,
    like_mine: bool = False,
    full: bool = False,
    kinds: str = "own",
    every_pair: bool = False,
    jobs: int = 1,
    console: Console | None = None,
) -> Proof:
    """Show that backends (names with commas, or `all`) change nothing of what a recipe learns.

    The words are those of `finetune prove`; `proof.json` and `proof.html` go to `output`.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was started.
    """
    shape = Shape(processes, steps, like_mine, full)
    request = Request(
        recipe=recipe,
        backends=named_backends(backends, recipe, shape),
        named=backends != "all",
        output=Path(output),
        kinds=named_kinds(kinds),
        shape=shape,
        precision="bf16" if bf16 else "fp32",
        every_pair=every_pair,
        jobs=jobs,
    )
    columns = (SpinnerColumn(), TextColumn("proving"), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(), transient=True) as progress:
        progress.add_task("proving")
        return carry_out(
            request,
            cache("data"),
            lambda line: progress.console.print(line, highlight=False, soft_wrap=True),
        )


class Ended(BaseException):
    """By a signal, whose number it has."""


def run(arguments: argparse.Namespace, recipe: Recipe, name: str) -> int:
    """Prove, tell, and return the exit status: 0 where everything holds, else 1.

    A signal ends every process that was started; the status is then 128 and its number.
    """
    if recipe.model.adapter is not None:
        raise FinetuneError("model.adapter: a proof starts from a new adapter; set it to null")

    def end(number: int, _: object) -> None:
        raise Ended(number)

    for number in heeded():  # in a script's background SIGINT would be ignored
        signal.signal(number, end)
    try:
        return _run(arguments, recipe, name)
    except Ended as ended:
        (number,) = ended.args
        print(f"interrupted by {signal.Signals(number).name}: nothing is proved", file=sys.stderr)
        return 128 + number


def _run(arguments: argparse.Namespace, recipe: Recipe, name: str) -> int:
    console = Console(stderr=arguments.json)
    output = arguments.output or Path("proofs") / Path(name).stem
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
        every_pair=arguments.pairs,
        jobs=arguments.jobs,
        console=console,
    )
    if arguments.json:
        print(json.dumps(read_proof(output / "proof.json"), indent=2))
    else:
        tell(proof, output, console)
    return 0 if proof.proved else 1


def named_backends(words: str | None, recipe: Recipe, shape: Shape) -> tuple[str, ...]:
    """`all`, names with commas, or by default the recipe's own (`ddp` where that is `single`)."""
    if words == "all":
        return tuple(known.names())
    if words is None:
        several = shape.processes > 1 and recipe.backend == "single"
        return ("ddp" if several else recipe.backend,)
    chosen = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in chosen:
        known.find(name)
    if not chosen:
        raise FinetuneError(f"--backends: got '{words}', expected names with commas, or all")
    return chosen


def named_kinds(words: str) -> tuple[Kind, ...]:
    """`own`, or some of lora, qlora and full with commas."""
    chosen = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    unknown = [word for word in chosen if word not in KINDS]
    if unknown:
        raise FinetuneError(f"--kinds: got '{unknown[0]}', expected some of {', '.join(KINDS)}")
    return chosen  # type: ignore[return-value]


def tell(proof: Proof, output: Path, console: Console) -> None:
    """The table of all pairs, what failed or was refused, and the verdict."""
    table = overview(read_proof(output / "proof.json"))
    console.print(_drawn(table.columns, table.rows))
    for check in proof.checks:
        if check.passed is False:
            where = f"{KINDS[check.kind]} on {check.backend}, {check.name}"
            console.print(f"[red]failed[/]  {where}: {escape(check.summary)}", highlight=False)
    for refused in proof.refused:
        word = "not possible here:" if refused.missing else "refused"
        where = f"{KINDS[refused.kind]} on {refused.backend}"
        console.print(f"[dim]{word} {where}: {escape(refused.reason)}[/]", highlight=False)
    colour = "green" if proof.proved else "red"
    console.print(f"[bold {colour}]{proof.verdict}[/]", highlight=False)
    console.print(f"{output / 'proof.html'} has every number", highlight=False)


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    drawn = Table(*columns)
    for row in rows:
        drawn.add_row(*(f"[bold red]{cell}[/]" if cell == "NO" else str(cell) for cell in row))
    return drawn
