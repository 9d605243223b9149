"""Tokens per second and peak memory of the training loop under each backend."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import finetune
from benchmarks.job import LARGE, SMALL, Shape, write_job
from benchmarks.record import Result
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner import plan
from finetune.runs import units
from finetune.runs.run import Run

BACKENDS = (
    "single", "ddp",
    "fsdp_full_shard", "fsdp_shard_grad_op",
    "fsdp_full_shard_offload", "fsdp_shard_grad_op_offload",
    "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload",
)  # fmt: skip
REFERENCES = ("single", "ddp")
WARMUP = 3
"""Untimed first steps, in which memory is allocated and kernels are selected."""
RUNS = 3
"""Runs of each backend, in turns, because other load on the machine slows some of them."""


def measure(
    folder: Path, backends: Sequence[str], steps: int, gpu: bool,
    publish: Callable[[Result], object], runs: int = RUNS, minutes: float = math.inf,
) -> Result:  # fmt: skip
    """Train `WARMUP` + `steps` optimizer steps on each backend, `runs` times in turns.

    No run starts after `minutes`; runs that did not start are in the remarks. The results are
    published after each run.
    """
    until = time.monotonic() + 60 * minutes
    shape = LARGE if gpu else SMALL
    recipe = write_job(folder / "job", shape, WARMUP + steps)
    precision = "bf16" if gpu else "fp32"
    possible: dict[str, int] = {}
    remarks: list[str] = []
    for backend in backends:
        count = 1 if backend == "single" else min(2, torch.cuda.device_count()) if gpu else 2
        try:
            plan(catalog.load(recipe), backend, count, precision)
        except FinetuneError as error:
            remarks.append(f"`{backend}` was skipped: {'; '.join(error.problems)}")
            print(remarks[-1], flush=True)
        else:
            possible[backend] = count
    turns: list[dict[str, dict[str, Any]]] = [{} for _ in range(runs)]

    def result(when: str) -> Result:
        missing = [
            f"`{backend}`: {ran} of {runs} runs{when}"
            for backend in possible
            if (ran := sum(backend in turn for turn in turns)) < runs
        ]
        return _result(turns, shape, steps, precision, [*remarks, *missing])

    for _ in in_turns(folder, recipe, possible, precision, turns, until):
        publish(result(""))
    return result(f", after {minutes:g} minutes")


def _result(
    turns: Sequence[dict[str, dict[str, Any]]],
    shape: Shape,
    steps: int,
    precision: str,
    remarks: list[str],
) -> Result:
    measured, runs = fastest(turns), len(turns)
    add_ratios(measured)
    values = {"precision": precision, "timed_steps": steps, "runs": runs, "backends": measured}
    told = (
        "as PyTorch allocated it"
        if precision == "bf16"
        else "with Python and its libraries, which are most of it here"
    )
    how = (
        f"A Llama with random weights, all of them trained with AdamW in {precision}; {shape.rows} "
        f"rows of {shape.length} tokens a step, {shape.micro_rows} in a micro-batch. Of each "
        f"backend the fastest of {runs} runs, which took turns: median of {steps} steps after "
        f"{WARMUP} others. Memory is the peak of the process that held most, {told}."
    )
    return Result("Training on each backend", how, values, tabulate(measured), remarks)


def fastest(turns: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The results of the fastest run of each backend."""
    return {
        backend: max(
            (turn[backend] for turn in turns if backend in turn),
            key=lambda each: each["tokens_per_second"],
        )
        for backend in turns[0]
    }


def in_turns(
    folder: Path,
    recipe: Path,
    processes: dict[str, int],
    precision: str,
    turns: list[dict[str, dict[str, Any]]],
    until: float = math.inf,
) -> Iterator[None]:
    """Train on each backend in each of the turns, and yield after each run.

    Args:
        folder: Folder for runs and cache.
        recipe: Path of the recipe.
        processes: Number of processes by backend.
        precision: Mixed precision of the runs.
        turns: Results of each turn by backend, which are added to.
        until: Value of `time.monotonic` after which no run starts.
    """
    for turn, (backend, count) in itertools.product(range(len(turns)), processes.items()):
        if time.monotonic() > until:
            break
        run = Run(folder / f"{backend}-{turn}")
        finetune(
            "launch", recipe, "--backend", backend, "--processes", str(count), "--no-plot",
            "--precision", precision, "--output", run.root,
            cache=folder / "cache",
        )  # fmt: skip
        found = turns[turn][backend] = read(run, count)
        print(f"{backend} on {count}: {found['tokens_per_second']:,.0f} tokens/s", flush=True)
        yield


def read(run: Run, processes: int) -> dict[str, Any]:
    """Speed, size and loss of a finished run."""
    steps = list(run.read_metrics("train"))[WARMUP:]
    (start,) = run.read_metrics("start")
    return {
        "processes": processes,
        "parameters": start["parameters"],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "step_seconds": statistics.median(step["seconds"] for step in steps),
        "peak_memory_bytes": steps[-1]["memory"],
        "final_loss": steps[-1]["loss"],
    }


def add_ratios(measured: dict[str, dict[str, Any]]) -> None:
    """Add ratios to the reference backends of the same session, if they ran."""
    for values in measured.values():
        for reference in REFERENCES:
            base = measured.get(reference, {})
            for key in ("tokens_per_second", "peak_memory_bytes"):
                ratio = values[key] / base[key] if base else None
                values[f"{key}_of_{reference}"] = ratio


def tabulate(measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    head = ["backend", "processes", "speed / `single`", "speed / `ddp`", "memory / `ddp`"]
    rows = [
        [
            f"`{backend}`",
            str(values["processes"]),
            share(values["tokens_per_second_of_single"]),
            share(values["tokens_per_second_of_ddp"]),
            share(values["peak_memory_bytes_of_ddp"]),
            f"{values['tokens_per_second']:,.0f}",
            units.size(values["peak_memory_bytes"]),
        ]
        for backend, values in measured.items()
    ]
    return [[*head, "tokens/s", "peak memory"], *rows]


def share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
