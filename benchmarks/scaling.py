"""Speedup of two processes over one, each with one thread.

All contenders are started at once and run in turns, so that other load on the machine affects all
of them equally. `python -m benchmarks.scaling FILE BURST` computes matrix products.
"""

import contextlib
import dataclasses
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.commands import SECONDS, start
from benchmarks.job import DEEP, Shape, write_adapter_job
from benchmarks.record import Result
from finetune.backend.axes import Axes
from finetune.planner.schedules import bubble
from finetune.runs import units
from finetune.runs.run import Run

BACKENDS = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero2", "zero3")
WARMUP = 3
"""Untimed first steps, in which memory is allocated and kernels are selected."""
ENDLESS = 100_000
"""Steps of a run that is terminated externally."""
PRODUCTS = "matrix products"
BURST = 60
"""Number of matrix products timed together: about half a second."""

Clock = Callable[[], list[float]]
"""Returns the seconds of all steps so far."""


@dataclasses.dataclass
class Contender:
    """Processes that train, and are stopped except in their turns."""

    started: list["subprocess.Popen[bytes]"]
    clocks: list[Clock]
    """One clock per process that steps independently."""
    log: Path

    def turn(self) -> float:
        """Continue for one complete step; returns its seconds on the slowest clock."""
        first = [len(clock()) for clock in self.clocks]
        self.signal(signal.SIGCONT)
        self.reach([count + 2 for count in first])  # the interrupted step ends first
        self.signal(signal.SIGSTOP)
        return max(clock()[count + 1] for clock, count in zip(self.clocks, first, strict=True))

    def reach(self, counts: Sequence[int]) -> None:
        """Wait until each clock has reached its count of steps.

        Raises:
            RuntimeError: a process ended, or takes too long; the message has the end of the output.
        """
        deadline = time.monotonic() + SECONDS
        while any(len(clock()) < count for clock, count in zip(self.clocks, counts, strict=True)):
            ended = any(process.poll() is not None for process in self.started)
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"no further step\n{self.log.read_text()[-2_000:]}")
            time.sleep(0.05)

    def signal(self, number: int) -> list[psutil.Process]:
        """Send a signal to all processes, which are returned; torch gives each worker a session."""
        reached: list[psutil.Process] = []
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                root = psutil.Process(process.pid)
                for each in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
                        reached.append(each)
        return reached

    def end(self) -> None:
        reached = self.signal(signal.SIGKILL)
        for process in self.started:
            process.wait()
        psutil.wait_procs(reached, timeout=SECONDS)  # workers are not children of this process


def measure(
    folder: Path,
    backends: Sequence[str],
    turns: int,
    shape: Shape = DEEP,
    burst: int = BURST,
) -> Result:
    """Train with LoRA in bf16 on one process, and on two with each backend, in turns."""
    recipe = write_adapter_job(folder / "job", shape, ENDLESS)
    runs = {backend: Run(folder / backend) for backend in ("single", *backends)}
    with contextlib.ExitStack() as held:
        racing: dict[str, Contender] = {}
        for backend, run in runs.items():
            processes = 1 if backend == "single" else 2
            racing[backend] = held.enter_context(training(folder, recipe, run, processes))
        alone, both = (held.enter_context(multiplying(folder, count, burst)) for count in (1, 2))
        found: list[dict[str, float]] = []
        for _ in range(turns):
            found.append({name: contender.turn() for name, contender in racing.items()})
            # Two processes complete two bursts in the time of the slower one.
            found[-1] |= {PRODUCTS: both.turn() / 2, f"{PRODUCTS}, one": alone.turn()}
            told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found[-1].items())
            print(told, flush=True)
    return result(runs, found, shape)


@contextlib.contextmanager
def training(folder: Path, recipe: Path, run: Run, processes: int) -> Iterator[Contender]:
    """A run with `processes` processes, after its first steps."""
    backend = run.root.name
    words = [
        "finetune", "launch", str(recipe), "--backend", backend, "--processes", str(processes),
        "--precision", "bf16", "--no-plot", "--output", str(run.root),
    ]  # fmt: skip
    log = folder / f"{backend}.log"
    process = start(words, log, cache=folder / "cache", threads=1)

    def clock() -> list[float]:
        return [step["seconds"] for step in run.read_metrics("train")]

    with stopped(Contender([process], [clock], log)) as contender:
        yield contender


@contextlib.contextmanager
def multiplying(folder: Path, count: int, burst: int) -> Iterator[Contender]:
    """`count` independent processes that compute only matrix products."""
    files = [folder / f"products-{count}-{number}.txt" for number in range(count)]
    log = folder / f"products-{count}.log"
    started = [
        start(["benchmarks.scaling", str(file), str(burst)], log, cache=folder / "cache", threads=1)
        for file in files
    ]

    def clock(file: Path) -> Clock:
        # Text after the last newline is an incomplete line.
        return lambda: [float(line) for line in _text(file).split("\n")[:-1]]

    with stopped(Contender(started, [clock(file) for file in files], log)) as contender:
        yield contender


@contextlib.contextmanager
def stopped(contender: Contender) -> Iterator[Contender]:
    """Stop a contender after its first steps, and terminate it at the end."""
    try:
        contender.reach([WARMUP] * len(contender.clocks))
        contender.signal(signal.SIGSTOP)
        yield contender
    finally:
        contender.end()


def result(runs: dict[str, Run], turns: list[dict[str, float]], shape: Shape) -> Result:
    """The ratios of each turn, and their medians."""
    measured: dict[str, Any] = {}
    for name in (*runs, PRODUCTS):
        one = f"{PRODUCTS}, one" if name == PRODUCTS else "single"
        ratios = [turn[one] / turn[name] for turn in turns]
        measured[name] = {
            "processes": 1 if name == "single" else 2,
            "speedup": statistics.median(ratios),
            "speedup_of_turns": ratios,
        }
    limit = measured[PRODUCTS]["speedup_of_turns"]
    for name, run in runs.items():
        steps = list(run.read_metrics("train"))
        (begun,) = run.read_metrics("start")
        of_limit = zip(measured[name]["speedup_of_turns"], limit, strict=True)
        measured[name] |= {
            "speedup_of_products": statistics.median(mine / most for mine, most in of_limit),
            "parameters": begun["parameters"],
            "loss": steps[WARMUP - 1]["loss"],
            "peak_memory_bytes": steps[-1]["memory"],
        }
    how = (
        f"LoRA r=16 on every linear layer of a Llama with {shape.layers} layers of "
        f"{shape.hidden_size} and random weights, in bf16; {shape.rows} packs of {shape.length} "
        f"tokens a step, {shape.micro_rows} in a micro-batch, one thread in each process. All runs "
        "are there at once, and take an optimizer step in turn, after 3 or more others, while the "
        f"rest is stopped: medians of the ratios of {len(turns)} turns. Matrix products alone, of "
        "one process and of two that know nothing of each other, take turns with them: what a "
        "second process of this machine brings at most at that moment."
    )
    values: dict[str, Any] = {"turns": turns, "backends": measured}
    title = "Two processes against one"
    if "pp" in runs:
        title = "Two stages of a pipeline against one process"
        count = shape.rows // shape.micro_rows
        values["bound"] = 2 * (1 - bubble(Axes(pipeline=2), count))
        how += (
            f" With {count} micro-batches and the schedule 1F1B, two stages that compute for "
            f"equally long are at most {values['bound']:.2f} times as fast as one process, because "
            f"each is idle for {bubble(Axes(pipeline=2), count):.1%} of a step."
        )
    return Result(title, how, values, tabulate(measured), [])


def tabulate(measured: dict[str, Any]) -> list[list[str]]:
    head = ["", "processes", "speed / one process", "least and most", "/ matrix products"]
    rows = [
        [
            name if name == PRODUCTS else f"`{name}`",
            str(values["processes"]),
            f"{values['speedup']:.2f}",
            f"{min(values['speedup_of_turns']):.2f} to {max(values['speedup_of_turns']):.2f}",
            f"{values['speedup_of_products']:.2f}" if values["processes"] == 2 and name != PRODUCTS
            else "",
            units.size(values["peak_memory_bytes"]) if name != PRODUCTS else "",
        ]
        for name, values in measured.items()
    ]  # fmt: skip
    return [[*head, "peak memory"], *rows]


def multiply(file: Path, burst: int) -> None:
    """Compute products of a layer's shape in bf16 endlessly, writing the seconds of each burst."""
    torch.manual_seed(0)
    rows = torch.randn(4 * DEEP.length, DEEP.hidden_size).bfloat16()
    weight = torch.randn(3 * DEEP.hidden_size, DEEP.hidden_size).bfloat16()
    while True:
        begun = time.perf_counter()
        for _ in range(burst):
            rows @ weight.T
        with file.open("a") as lines:
            lines.write(f"{time.perf_counter() - begun}\n")


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    multiply(Path(sys.argv[1]), int(sys.argv[2]))
