"""A job: a plan, its run directory, and the words that each process of it is started with."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetune import backend as backends
from finetune import extensions
from finetune.checkpoints.resume import Resume, card, claim, finished
from finetune.launchers import LAUNCHERS
from finetune.planner import Plan
from finetune.recipe import Recipe
from finetune.runs.run import Run
from finetune.training.preflight import check


@dataclasses.dataclass(frozen=True)
class Job:
    """What a launcher carries out."""

    plan: Plan
    run: Run
    resume: Resume
    precision: backends.Precision | None
    """Instead of the backend's."""
    arguments: tuple[str, ...]
    """Words for `finetune train`, besides the recipe, the run directory and `--resume`."""
    flags: tuple[str, ...]
    """Words for the launcher itself."""
    max_restarts: int


Launcher = Callable[[Job], None]
"""Starts the processes of a job, waits for their end, and raises what ended them."""


def launch(
    recipe: Recipe,
    backend: str | None = None,
    processes: int | None = None,
    output: str | Path | None = None,
    resume: Resume = False,
    precision: backends.Precision | None = None,
    arguments: Sequence[str] = (),
    flags: Sequence[str] = (),
    max_restarts: int = 0,
    *,
    launcher: str = "accelerate",
    shard_size: int | None = None,
    axes: Mapping[str, int | str | None] | None = None,
) -> Run:
    """Train in processes of their own, through `accelerate launch`, and wait for the end.

    Args:
        arguments: words for `finetune train`.
        flags: words for `accelerate launch`, those of several machines too.
        max_restarts: how often all processes start anew after a failure, from the newest
            checkpoint.
        shard_size: under hybrid sharding the processes that hold one copy of the model together;
            by default those of one machine.
        axes: processes along the axes that divide the model, by the fields of
            `finetune.backend.axes.Axes`; by default those of the backend's file.
        launcher: a name of `finetune.launchers.LAUNCHERS`, or `module:function` of a `Launcher`.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was started.
        TrainingFailure: the processes ended with an error.
        Interrupted: by SIGTERM, SIGINT or SIGHUP; what was trained is saved.
    """
    start: Launcher = extensions.find("--launcher", launcher, LAUNCHERS)
    machine = backends.load(backend or recipe.backend)
    machine, count = backends.divided(machine, processes, axes or {})
    machine = backends.sized(machine, count, machines(flags), shard_size)
    plan = check(recipe, machine, count, precision)
    run = Run(Path(output or Path("runs") / "latest"))
    if resume and finished(run, plan) and card(run).is_file():
        print(f"{run.root}: complete, nothing to resume", flush=True)
        return run
    if max_restarts:
        # A process that starts anew has the words of the first one: `auto` serves both, once it is
        # known here that the first one may begin.
        claim(run, plan, resume)
        resume = "auto"
    start(Job(plan, run, resume, precision, tuple(arguments), tuple(flags), max_restarts))
    return run


def machines(flags: Sequence[str]) -> int:
    """How many machines the job runs on, by the flags of `accelerate launch`."""
    words = " ".join(flags).replace("=", " ").replace("-", "_").split()
    given = [number for name, number in itertools.pairwise(words) if name == "__num_machines"]
    return int(given[-1]) if given and given[-1].isdigit() else 1
