"""The quickstart of rewards: one that is the goal, and one that a model can have without it."""

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from finetune import catalog
from finetune.evaluation.exact_match import exact_match, references
from finetune.inference.generate import load
from finetune.quickstart.job import FOLDER, HELD_OUT_ROWS, train_base, write_data
from finetune.recipe import Data
from finetune.reports.page import report
from finetune.runs import units
from finetune.runs.run import Run
from finetune.training.worker import train

HACKABLE = "finetune.quickstart.records:fields_found"
"""A reward that looks right and is not the goal."""


def quickstart_grpo(output: Path, steps: int = 20, hacked_steps: int = 20) -> tuple[Run, Run]:
    """Teach a small model by exact match; beside it, by a reward that can be had without."""
    begun = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains little from more
    console = Console()
    console.rule("[bold]1 of 4[/]  data, and a small Llama from scratch")
    if not (FOLDER / "data").is_dir():
        write_data(FOLDER)
    train_base()
    console.rule("[bold]2 of 4[/]  supervised: a few steps, so that a sample is right at times")
    start = Run(FOLDER / "grpo_start")
    if not start.final.exists():
        recipe = catalog.resolve("quickstart_grpo_start")
        train(recipe, precision="fp32", output=start.root, resume="auto")
    console.rule("[bold]3 of 4[/]  GRPO: reward 1 for the exact record, else 0")
    run = _train(output, steps, [])
    console.rule("[bold]4 of 4[/]  GRPO from the same start: reward for each field that occurs")
    hacked = _train(
        output.with_name(f"{output.name}-hacked"), hacked_steps,
        [f'reward_funcs=["{HACKABLE}"]'],
    )  # fmt: skip
    rows = references(Data(str(FOLDER / "data" / "held_out.jsonl"), "messages"))
    before = exact_match(load(start), rows, max_new_tokens=48, batch_rows=64).share
    console.print(result_table(before, run, hacked, time.perf_counter() - begun))
    for verb in (f"report {run.root}", f"report {hacked.root}", f"chat {run.root}"):
        console.print(f"  next: [bold].venv/bin/finetune {verb}[/]", highlight=False)
    return run, hacked


def _train(output: Path, steps: int, changes: list[str]) -> Run:
    recipe = catalog.resolve("quickstart_grpo", [*changes, f"max_steps={steps}"])
    run = train(recipe, precision="fp32", output=output, resume="auto")
    report(run)
    return run


def result_table(before: float, run: Run, hacked: Run, seconds: float) -> Table:
    """What each reward taught, by the reward itself and by what was meant."""
    table = Table(title="GRPO: the reward is what is learned", title_style="bold")
    for name in ("", "reward: exact match", "reward: fields that occur"):
        table.add_column(name)
    sampled, exact = zip(*(_last(each) for each in (run, hacked)), strict=True)
    table.add_row("reward of samples at the end", *(f"{each:.2f}" for each in sampled))
    table.add_row(f"exact match of {HELD_OUT_ROWS} before", *[f"{before:.1%}"] * 2)
    table.add_row("exact match after", *(f"{each:.1%}" for each in exact))
    table.add_row("all of it took", units.duration(seconds), "")
    return table


def _last(run: Run) -> tuple[float, float]:
    """Reward of the last step's samples, and exact match of the last evaluation."""
    trained, evaluated = (list(run.read_metrics(kind))[-1] for kind in ("train", "eval"))
    return trained["metrics"]["reward"], evaluated["metrics"]["rewards/exact_match/mean"]
