"""Run the quickstart of rewards: GRPO with a reward for the goal, and with one that can be hacked.

GRPO learns nothing from samples that are all wrong. Training therefore starts from the model of the
preference quickstart: in one training answer of five, the keys of the record are in alphabetical
order, which is the goal here. Its greedy answers never have that order, but one sample in seven
does, and neither depends on how far a few steps on a CPU get.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune import catalog
from finetune.evaluation.exact_match import exact_match, references
from finetune.inference.generate import load
from finetune.quickstart.records import instructions
from finetune.quickstart.supervised import (
    ANSWERS,
    FOLDER,
    HELD_OUT_ROWS,
    TRAIN_ROWS,
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

HACKABLE = "finetune.quickstart.records:fields_found"
"""A reward that looks right but does not measure the goal."""
PROMPTS, HELD_OUT = (FOLDER / "data" / f"wanted{kind}.jsonl" for kind in ("", "_held_out"))
"""Orders with their record, whose keys are in alphabetical order."""


def quickstart_grpo(output: Path) -> tuple[Run, Run]:
    """Train a small model with exact match as its reward, then another with a hackable reward.

    Raises:
        TrainingFailure: the first did not learn it.
    """
    started = time.perf_counter()
    console = Console()
    console.rule("[bold]1 of 4[/]  data, and a small Llama from scratch")
    if not (FOLDER / "data").is_dir():
        write_data(FOLDER)
    write_wanted()
    train_base()
    console.rule("[bold]2 of 4[/]  supervised: records, one in five with alphabetical keys")
    start = train_start()
    console.rule("[bold]3 of 4[/]  GRPO: reward 1 for the exact record with alphabetical keys")
    run = _train(output)
    console.rule("[bold]4 of 4[/]  GRPO from the same start: reward for each field that occurs")
    hacked = _train(output.with_name(f"{output.name}-hacked"), f'reward_funcs=["{HACKABLE}"]')
    rows = references(Data(str(HELD_OUT), "messages"))
    before = exact_match(load(start), rows, max_new_tokens=48, batch_rows=ANSWERS).share
    console.print(result_table(before, run, hacked, time.perf_counter() - started))
    refuse_miss("grpo", f"exact match of {HELD_OUT_ROWS} held-out orders", _rewards(run)[2])
    print_next(console, f"report {run.root}", f"report {hacked.root}", f"chat {run.root}")
    return run, hacked


def write_wanted() -> None:
    """Write the prompts with their reference answers."""
    write_lines(PROMPTS, list(instructions(0, TRAIN_ROWS, alphabetical=True)))
    write_lines(HELD_OUT, list(instructions(0, HELD_OUT_ROWS, held_out=True, alphabetical=True)))


def _train(output: Path, *changes: str) -> Run:
    recipe = catalog.resolve("quickstart_grpo", changes)
    run = train(recipe, precision="fp32", output=output, resume="auto")
    report(run)
    return run


def result_table(before: float, run: Run, hacked: Run, seconds: float) -> Table:
    """Table of each run's own reward, and of exact match, the actual goal."""
    table = Table(title="GRPO: the reward is what is learned", title_style="bold")
    for name in ("", "reward: exact match", "reward: fields that occur"):
        table.add_column(name)
    first, last, exact = zip(*(_rewards(each) for each in (run, hacked)), strict=True)
    table.add_row("reward of first samples", *(f"{each:.2f}" for each in first))
    table.add_row("reward of last samples", *(f"{each:.2f}" for each in last))
    table.add_row(f"exact match of {HELD_OUT_ROWS} before", *[f"{before:.1%}"] * 2)
    table.add_row("exact match after", *(f"{each:.1%}" for each in exact))
    table.add_row("total time", units.duration(seconds), "")
    return table


def _rewards(run: Run) -> tuple[float, float, float]:
    """Mean reward in the first and the last step, and exact match in the last evaluation."""
    trained = [record["metrics"]["reward"] for record in run.read_metrics("train")]
    evaluated = list(run.read_metrics("eval"))[-1]
    return trained[0], trained[-1], evaluated["metrics"]["rewards/exact_match/mean"]
