"""A job: a plan, its run directory, and the arguments of its processes."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetune import backend as backends
from finetune import extensions
from finetune.checkpoints.copies import stored
from finetune.checkpoints.resume import Resume, card, claim, finished
from finetune.checks.request import check
from finetune.launchers import LAUNCHERS
from finetune.planner import Plan
from finetune.recipe import Recipe
from finetune.runs.addresses import is_address
from finetune.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of a launcher."""

    plan: Plan
    run: Run
    resume: Resume
    precision: backends.Precision | None
    """Overrides the precision of the backend; None keeps it."""
    arguments: tuple[str, ...]
    """Arguments of `finetune train` other than the recipe, the run directory and `--resume`."""
    flags: tuple[str, ...]
    """Arguments of the launcher itself."""
    max_restarts: int
    join_minutes: float = 5.0


Launcher = Callable[[Job], None]
"""Starts the processes of a job, waits for them, and raises an exception if they failed."""


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
    join_minutes: float = 5.0,
    launcher: str = "accelerate",
    shard_size: int | None = None,
    axes: Mapping[str, int | str | None] | None = None,
) -> Run:
    """Train in new processes with `accelerate launch`, and wait for them.

    Args:
        arguments: arguments of `finetune train`.
        flags: arguments of `accelerate launch`, including those for several machines.
        max_restarts: maximum number of restarts of all processes after a failure, each from the
            newest checkpoint.
        join_minutes: minutes that a machine of several waits for the others to start.
        shard_size: processes over which hybrid sharding shards one copy of the model; by default
            those of one machine.
        axes: sizes of the axes that divide the model, by the fields of
            `finetune.backend.axes.Axes`; by default those of the backend's file.
        launcher: a name in `finetune.launchers.LAUNCHERS`, or `module:function` of a `Launcher`.

    Raises:
        FinetuneError: the request cannot be satisfied; nothing was started.
        TrainingFailure: the processes ended with an error.
        Interrupted: stopped by SIGTERM, SIGINT or SIGHUP; training progress is saved.
    """
    start: Launcher = extensions.find("--launcher", launcher, LAUNCHERS)
    machine = backends.load(backend or recipe.backend)
    machine, count = backends.divided(machine, processes, axes or {})
    machine = backends.sized(machine, count, machines(flags), shard_size)
    plan = check(recipe, machine, count, precision)
    here = number_of(flags, "machine_rank") or 0
    with stored(output or Path("runs") / "latest", resume, here, machines(flags)) as folder:
        run = Run(folder)
        if resume and finished(run, plan) and card(run).is_file():
            print(f"{run.root}: complete, nothing to resume", flush=True)
            return run
        if max_restarts:
            # A restarted process gets the arguments of the first. `auto` works for both, once it is
            # checked here that the first may start.
            if not (here and is_address(output)):  # whose directory has only what its ranks read
                claim(run, plan, resume)
            resume = "auto"
        job = Job(
            plan, run, resume, precision, tuple(arguments), tuple(flags), max_restarts, join_minutes
        )
        start(job)
        return run


def machines(flags: Sequence[str]) -> int:
    """Number of machines of a job, from the flags of `accelerate launch`."""
    return number_of(flags, "num_machines") or 1


def number_of(flags: Sequence[str], name: str) -> int | None:
    """The last value of a flag that is a number; in flags, `name` may have dashes."""
    words = " ".join(flags).replace("=", " ").replace("-", "_").split()
    given = [number for each, number in itertools.pairwise(words) if each == f"__{name}"]
    return int(given[-1]) if given and given[-1].isdigit() else None
