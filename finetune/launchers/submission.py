"""Submit a job to a scheduler: plan it for the cluster, check it, and record it with its run."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple

from finetune import catalog, extensions
from finetune.errors import FinetuneError
from finetune.launchers import QUEUES
from finetune.launchers.cluster import Settings
from finetune.planner import Plan
from finetune.planner.estimate import fewest_changes, wording
from finetune.planner.estimate.plan_api import described
from finetune.planner.estimate.predict import predict
from finetune.planner.estimate.row_counts import local_rows
from finetune.process import interpreter
from finetune.runs import attempts, standing
from finetune.runs.environment import without_secrets
from finetune.runs.foreign import refuse_foreign
from finetune.runs.progress import Watch
from finetune.runs.run import Run, read_object, write_json

SECONDS_TO_ANSWER = 60
"""Seconds within which a scheduler answers a question."""

PENDING = ("queued", "starting")
"""First words of the state of a run that its job will go on with."""
State = Literal["queued", "running", "ended"]


class JobState(NamedTuple):
    """The state of a job, with the scheduler's own words."""

    state: State
    words: str = ""


class Submitted(NamedTuple):
    """A submitted job."""

    id: str
    wait: Callable[[], None] | None = None
    """Runs a job that does not run without this process, to its end."""


@dataclasses.dataclass(frozen=True)
class Submission(Generic[Settings]):
    """A job before it is submitted."""

    name: str
    plan: Plan
    run: Run
    cluster: Settings
    words: tuple[str, ...]
    """Arguments of `finetune launch` after the recipe, without those of a machine."""
    min_machines: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that imports this copy of the toolkit, with the cluster's."""
        return interpreter.environment({**os.environ, **self.cluster.environment})

    @property
    def recipe(self) -> Path:
        """The resolved recipe, with the record of the job."""
        return self.run.job.parent / "job" / "recipe.json"

    def command(self, recipe: str | None = None, contained: bool = False) -> str:
        """The command of one machine, for a shell.

        Args:
            recipe: the file of the recipe there.
            contained: whether it runs in a container, which has its own `finetune`.
        """
        here = "finetune" if contained else shlex.join([sys.executable, "-P", "-m", "finetune"])
        words = ["launch", recipe or str(self.recipe), *self.words]
        return f"{self.cluster.command or here} {shlex.join(words)}"


@dataclasses.dataclass(frozen=True)
class Queue(Generic[Settings]):
    """A launcher that submits a job and does not wait for it."""

    settings: type[Settings]
    """The type of `clusters/NAME.yaml`."""
    describe: Callable[[Submission[Settings]], str]
    """What would be submitted, without secrets."""
    submit: Callable[[Submission[Settings]], Submitted]
    """Submits a job. Raises FinetuneError and leaves nothing behind."""
    status: Callable[[dict[str, Any]], JobState]
    """The state of a job, by its record."""
    cancel: Callable[[dict[str, Any], Run], str]
    """Lets a running job save and end, or cancels a queued one; returns what was done."""
    shares_disk: bool = True
    """Whether paths here are paths on the machines."""


def queue_of(record: dict[str, Any]) -> Queue[Any]:
    """The launcher of a recorded job."""
    return extensions.find("launcher", record["launcher"], QUEUES)


def state_of(run: Run) -> tuple[Watch, str]:
    """Where a run stands, and its state with that of its job.

    The scheduler is asked only if nothing trains in the run.
    """
    now, record = Watch(run).read(), read_object(run.job)
    if not record or now.locked or now.state in standing.COMPLETE:
        return now, now.state
    try:
        found = queue_of(record).status(record)
    except FinetuneError as error:
        return now, f"{now.state} (its job is unknown: {error})"
    if found.state != "ended":
        pending = "starting" if found.state == "running" else "queued"
        return now, f"{pending} ({found.words})"
    return now, now.state


def submit(launcher: str, queue: Queue[Settings], job: Submission[Settings], dry: bool) -> None:
    """Print the plan of a job for its cluster, and submit it.

    Args:
        dry: print the plan on stderr and what would be submitted on stdout, and submit nothing.

    Raises:
        FinetuneError: it does not fit, or the scheduler refuses it; nothing was submitted.
    """
    print(_planned(job), file=sys.stderr if dry else sys.stdout, flush=True)
    if dry:
        print(queue.describe(job))
        return
    known = read_object(job.run.job)
    if known and (found := queue_of(known).status(known)).state != "ended":
        raise FinetuneError(
            f"{job.run.root}: its job {known['id']} is {found.state}; end it with finetune stop "
            f"{job.run.root}, or choose another --output"
        )
    if not job.run.recipe.exists():
        refuse_foreign(job.run.root)
    known = job.recipe.parent.exists()
    try:
        write_json(job.recipe, catalog.to_fields(job.plan.recipe))
        job.run.log.with_name("stop").unlink(missing_ok=True)
        number, wait = queue.submit(job)
    except (FinetuneError, OSError):
        if not known:
            shutil.rmtree(job.recipe.parent, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty
                job.run.root.rmdir()
        raise
    attempts.submitted(job.run)
    write_json(job.run.job, {
        "launcher": launcher, "id": number, "submitted": time.time(),
        "devices": job.plan.processes, "price": job.cluster.price,
        "command": without_secrets(job.words),
    })  # fmt: skip
    root = shlex.quote(str(job.run.root))
    print(f"submitted    job {number}; finetune watch {root}, finetune stop {root}", flush=True)
    if wait is not None:
        wait()


def _planned(job: Submission[Settings]) -> str:
    """The plan of a job on its cluster.

    Raises:
        FinetuneError: it does not fit.
    """
    plan, cluster = job.plan, job.cluster
    machine = described(
        cluster.gpu, plan.processes, cluster.nodes, None, cluster.network, cluster.host_ram,
        price=cluster.price,
    )  # fmt: skip
    if machine is None:
        return plan.explain("cuda" if cluster.gpus else "cpu")
    found = predict(plan, machine, local_rows(plan.recipe))
    how = (found.workload, machine, plan.backend.precision)
    page = wording.page(found, [] if found.status == "safe" else fewest_changes.changes(*how))
    if found.status == "no":
        path = fewest_changes.shortest(*how) or ()
        instead = ", then ".join(step.setting for step in path) or "use more or larger GPUs"
        print(page)
        needed, usable = wording.size(found.totals.allocated), wording.size(found.usable)
        raise FinetuneError(
            f"cluster.gpus {cluster.gpus} of {cluster.nodes} nodes: it needs {needed} of {usable} "
            f"usable per GPU, so nothing was submitted; {instead}"
        )
    return f"{page}\n\n{plan.explain('cuda')}"


def ask(*words: str, given: str = "", **how: Any) -> str:
    """Run a program of a scheduler and return its output.

    Raises:
        FinetuneError: it is not installed, does not answer, or refuses; contains its own words.
    """
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER,
            check=False, **how,
        )  # fmt: skip
    except FileNotFoundError:
        raise FinetuneError(
            f"{words[0]}: not found; submit where the cluster's programs are installed"
        ) from None
    except subprocess.TimeoutExpired:
        raise FinetuneError(f"{words[0]}: no answer within {SECONDS_TO_ANSWER} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = [line.removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in lines]
        raise FinetuneError(f"{words[0]}: {'; '.join(told) or f'status {done.returncode}'}")
    return done.stdout.strip()


def recipe_text(job: Submission[Any]) -> str:
    """The recipe in JSON, for a job whose machines do not see this disk."""
    return json.dumps(catalog.to_fields(job.plan.recipe))
