"""Startup time of the command line, and time to the first training step."""

import statistics
import time
from pathlib import Path

from benchmarks.commands import finetune
from benchmarks.job import SMALL, write_job
from benchmarks.record import Result
from finetune.runs.run import Run

COMMANDS = {
    "list": ["list"],
    "show": ["show", "qwen3_0_6b_lora"],
    "plan": ["plan", "qwen3_0_6b_lora", "--backend", "fsdp_full_shard", "--processes", "2"],
    "plan on a machine": ["plan", "llama3_1_8b_full", "--gpu", "H100-80", "--gpus", "8"],
}
HOW = (
    "Wall time of a new process each. The first start of each kind is not counted: it reads the "
    "files from the disk. The first step is timed from typing `finetune train` to the end of the "
    "first optimizer step, on a Llama of 5.5 million parameters and rows never prepared before."
)


def measure(folder: Path, repeats: int) -> Result:
    """Time `repeats` starts of each command after an untimed one."""
    seconds: dict[str, list[float]] = {}
    for name, words in COMMANDS.items():
        seconds[name] = [_run(words, folder) for _ in range(repeats + 1)][1:]
        print(f"finetune {name}: {statistics.median(seconds[name]):.3f} s", flush=True)
    recipe = write_job(folder / "job", SMALL, steps=1)
    counted = max(1, repeats // 2)
    first = [_first_step(recipe, folder / f"train-{index}") for index in range(counted + 1)][1:]
    seconds["first step"] = first
    print(f"finetune train, to the first step: {statistics.median(first):.2f} s", flush=True)
    values = {
        name: {
            "median_seconds": statistics.median(taken),
            "best_seconds": min(taken),
            "starts": len(taken),
        }
        for name, taken in seconds.items()
    }
    rows = [
        [
            f"`finetune {' '.join(COMMANDS.get(name, ['train']))}`"
            + ("" if name in COMMANDS else f", to the end of the {name}"),
            f"{value['median_seconds']:.2f} s",
            f"{value['best_seconds']:.2f} s",
            str(value["starts"]),
        ]
        for name, value in values.items()
    ]
    table = [["command", "median", "best", "starts"], *rows]
    return Result("Start-up", HOW, values, table, [])


def _run(words: list[str], cache: Path) -> float:
    begun = time.perf_counter()
    finetune(*words, cache=cache)
    return time.perf_counter() - begun


def _first_step(recipe: Path, folder: Path) -> float:
    begun = time.time()
    finetune(
        "train", recipe, "--precision", "fp32", "--output", folder / "run", cache=folder / "cache"
    )
    return next(Run(folder / "run").read_metrics("train"))["time"] - begun
