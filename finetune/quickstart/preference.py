"""Run the preference quickstart: a model that answers in two ways learns the preferred one."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune import catalog
from finetune.evaluation.exact_match import exact_match, references
from finetune.inference.generate import load
from finetune.quickstart.records import preferences
from finetune.quickstart.supervised import (
    ANSWERS,
    FOLDER,
    HELD_OUT_ROWS,
    print_next,
    refuse_miss,
    train_base,
    train_start,
    write_data,
    write_lines,
)
from finetune.recipe import Data
from finetune.reports.page import report
from finetune.runs import units
from finetune.runs.run import Run
from finetune.training.worker import train

PAIRS = 640


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Properties of greedy answers, as shares of all answers."""

    valid: float
    """Share of answers that are JSON objects with the five keys of a record."""
    preferred: float
    """Share of answers that are records with keys in alphabetical order."""


def quickstart_dpo(output: Path) -> tuple[Run, Behaviour, Behaviour]:
    """Train a small model to answer in two ways, train it to prefer one with DPO, and compare.

    Raises:
        TrainingFailure: it did not learn that.
    """
    started = time.perf_counter()
    console = Console()
    console.rule("[bold]1 of 3[/]  data, and a small Llama from scratch")
    write_data(FOLDER)
    write_lines(FOLDER / "data" / "pairs.jsonl", list(preferences(0, PAIRS)))
    train_base()
    console.rule("[bold]2 of 3[/]  supervised: records, one in five with alphabetical keys")
    start = train_start()
    console.rule("[bold]3 of 3[/]  DPO: the record with alphabetical keys is the chosen one")
    run = train(catalog.resolve("quickstart_dpo"), precision="fp32", output=output, resume="auto")
    rows = references(Data(str(FOLDER / "data" / "held_out.jsonl"), "messages"))
    scores = (exact_match(load(each), rows, batch_rows=ANSWERS) for each in (start, run))
    before, after = (behaviour([one.answer for one in each.examples]) for each in scores)
    report(run)
    console.print(result_table(run, before, after, time.perf_counter() - started))
    refuse_miss("dpo", f"share of preferred answers to {HELD_OUT_ROWS} orders", after.preferred)
    print_next(console, f"chat {run.root}", f"report {run.root}")
    return run, before, after


def behaviour(texts: Sequence[str]) -> Behaviour:
    """Shares of valid and of preferred answers."""
    read = [_keys(text) for text in texts]
    valid = [keys for keys in read if set(keys) == {"city", "count", "day", "item", "name"}]
    preferred = [keys for keys in valid if keys == sorted(keys)]
    return Behaviour(len(valid) / len(texts), len(preferred) / len(texts))


def _keys(text: str) -> list[str]:
    """Keys of a JSON object in their order; empty if the text is not a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return list(found) if isinstance(found, dict) else []


def result_table(run: Run, before: Behaviour, after: Behaviour, seconds: float) -> Table:
    """Table of preferred and valid answers before and after, and the margin of rewards."""
    last = list(run.read_metrics("train"))[-1]
    table = Table(title="DPO: alphabetical keys are preferred", title_style="bold")
    for name in (f"of {HELD_OUT_ROWS} held-out orders", "before", "after"):
        table.add_column(name)
    table.add_row("preferred answers", f"{before.preferred:.1%}", f"{after.preferred:.1%}")
    table.add_row("valid records", f"{before.valid:.1%}", f"{after.valid:.1%}")
    table.add_row("margin of rewards", "0", f"{last['metrics']['rewards/margins']:.3g}")
    table.add_row("total time", "", units.duration(seconds))
    return table
