"""Run the quickstart: generate data, train a base model, fine-tune it, and compare the two."""

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from finetune import catalog
from finetune.errors import TrainingFailure
from finetune.evaluation.exact_match import Score, exact_match, references, samples
from finetune.inference.generate import load, load_base
from finetune.inference.load import trained_dtype
from finetune.launchers.job import launch
from finetune.quickstart.records import corpus, instructions, mixed
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Data
from finetune.reports.page import report
from finetune.runs import units
from finetune.runs.limits import usable_cores
from finetune.runs.run import Run, write_json
from finetune.training.worker import train

FOLDER = Path("quickstart")
"""Folder of the data and the base of the recipes `quickstart_base` and `quickstart`."""
CORPUS_ROWS = 40_000
TRAIN_ROWS = 3_000
HELD_OUT_ROWS = 200
START_ROWS = 1_920
VOCABULARY = 1_536
ANSWERS = 64
"""Rows answered at once: small ones."""
GOAL = 0.8
"""Share of the answers below which the quickstarts of DPO and GRPO count as failed."""


def quickstart(output: Path) -> Run:
    """Generate the data, train the base, fine-tune it with QLoRA, and print a comparison."""
    started = time.perf_counter()
    # A small model gains little from more threads, and loses a lot to busy cores.
    torch.set_num_threads(1)
    console = Console()
    console.rule("[bold]1 of 3[/]  data and tokenizer, generated")
    write_data(FOLDER)
    console.print(
        f"{CORPUS_ROWS:,} documents, {TRAIN_ROWS:,} training and {HELD_OUT_ROWS} held-out rows"
    )
    console.rule("[bold]2 of 3[/]  a small Llama, from scratch")
    train_base()
    console.rule("[bold]3 of 3[/]  QLoRA (NF4) on a task that the base fails")
    recipe = catalog.resolve("quickstart")
    run = train(recipe, precision="fp32", output=output, resume="auto")
    rows = references(Data(str(FOLDER / "data" / "held_out.jsonl"), "messages"))
    tuned = load(run)
    base = load_base(recipe, tuned.tokenizer, trained_dtype(run))
    before, after = (exact_match(each, rows, batch_rows=ANSWERS) for each in (base, tuned))
    answered = [[example.answer for example in score.examples] for score in (before, after)]
    write_json(run.samples, samples(rows, *answered))
    report(run)
    console.print(result_table(run, before, after, time.perf_counter() - started))
    print_next(
        console,
        f"eval {run.root} --against base",
        f"chat {run.root}",
        f"report {run.root}",
        f"export {run.root} --to merged --merge",
        f"board {run.root}",
    )
    return run


def print_next(console: Console, *commands: str) -> None:
    """Print commands to try after a quickstart."""
    for command in commands:
        console.print(
            f"  next: [bold].venv/bin/finetune {command}[/]", highlight=False, soft_wrap=True
        )


def train_base() -> None:
    """Train the base from scratch, unless it exists: on a CPU with two processes, if it has cores.

    The steps are the same as those of one process.
    """
    base = Run(FOLDER / "base")
    if base.final.exists():
        return
    recipe = catalog.resolve("quickstart_base")
    if usable_cores() < 2 or torch.accelerator.is_available():
        train(recipe, precision="fp32", output=base.root, resume="auto")
        return
    launch(
        recipe,
        backend="ddp",
        processes=2,
        output=base.root,
        resume="auto",
        precision="fp32",
        flags=("--num_cpu_threads_per_process", "1"),
    )


def train_start() -> Run:
    """Train the base on records with keys in two orders (see `mixed`), unless it exists."""
    start = Run(FOLDER / "start")
    if not start.final.exists():
        write_lines(FOLDER / "data" / "mixed.jsonl", list(mixed(0, START_ROWS)))
        recipe = catalog.resolve("quickstart_start")
        train(recipe, precision="fp32", output=start.root, resume="auto")
    return start


def refuse_miss(method: str, what: str, share: float) -> None:
    """Raise if a quickstart did not reach its goal, with the models that it started from.

    Args:
        method: name in the message.
        what: measure of the goal.
        share: its value after training, at most 1.

    Raises:
        TrainingFailure: less than `GOAL`.
    """
    if share >= GOAL:
        return
    origins: list[str] = []
    for name in ("base", "start"):
        run = Run(FOLDER / name)
        last = list(run.read_metrics("train"))[-1:]
        origins += [
            f"{run.root} ended at step {each['step']}, loss {each['loss']:.3f}" for each in last
        ]
    raise TrainingFailure(
        f"quickstart --method {method}: {what} is {share:.1%} after training, expected at least "
        f"{GOAL:.0%}. It learns only from answers that its starting model can already give "
        f"({'; '.join(origins)}): delete {FOLDER / 'base'} and {FOLDER / 'start'} to train both "
        "again, choose another --output, and repeat it"
    )


def write_data(folder: Path) -> None:
    """Write corpus, rows and tokenizer, with the same bytes every time."""
    documents = list(corpus(seed=0, rows=CORPUS_ROWS))
    rows = list(instructions(seed=0, rows=TRAIN_ROWS))
    held_out = list(instructions(seed=0, rows=HELD_OUT_ROWS, held_out=True))
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_lines(data / "corpus.jsonl", [{"text": document} for document in documents])
    write_lines(data / "train.jsonl", rows)
    write_lines(data / "held_out.jsonl", held_out)
    turns = [turn["content"] for row in rows for turn in row["messages"]]
    train_tokenizer([*documents[:8_000], *turns], VOCABULARY, folder / "tokenizer")


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def result_table(run: Run, before: Score, after: Score, seconds: float) -> Table:
    """Table of the results: exact match before and after, speed, memory, and the run directory."""
    ended = list(run.read_metrics("end"))[-1]
    table = Table(title="QLoRA on free text -> JSON record", show_header=False, title_style="bold")
    rows = {
        "exact match before": f"{before.share:.1%} of {before.rows} held-out rows",
        "exact match after": f"{after.share:.1%} of {after.rows} held-out rows",
        "speed": f"{ended['tokens_per_second']:,.0f} tokens/s",
        "peak memory": units.size(ended["peak_memory"]),
        "total time": units.duration(seconds),
        "run": str(run.root),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
