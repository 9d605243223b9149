"""Print a proof on the terminal: its table, failed and refused pairs, and the verdict."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.reports.proof_page import KINDS, overview, read_proof
from finetune.verification.proofs.proof import Proof


def print_table(proof: Proof, output: Path, console: Console) -> None:
    """Print the table of all pairs, failed and refused ones, and the verdict."""
    table = overview(read_proof(output / "proof.json"))
    console.print(_drawn(table.columns, table.rows))
    for check in proof.checks:
        if check.passed is False:
            where = f"{KINDS[check.kind]} on {check.backend}, {check.name}"
            console.print(f"[red]failed[/]  {where}: {escape(check.summary)}", highlight=False)
    for refused in proof.refused:
        word = "not possible here:" if refused.missing else "refused:"
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
