"""Submit a job to SLURM, which starts it again after a preemption, a time limit or a lost node."""

import math
import re
import shlex
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.errors import FinetuneError, Interrupted
from finetune.launchers.cluster import Above0, Cluster
from finetune.launchers.submission import JobState, Queue, State, Submission, Submitted, ask
from finetune.recipe.field_types import STRICT, Positive, Text
from finetune.runs.run import Run

STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"), "running"),
}
"""States of SLURM's jobs (squeue(1)); all others have ended."""

HOPELESS = re.compile(
    r"(Partition(Config|(Time|Node)Limit)|BadConstraints|(Account|QOS)Not|Invalid(Account|QOS))"
    r"|account not"
)
"""Reasons of pending jobs that waiting does not remove (squeue(1), SLURM 22.05)."""
SECONDS_FOR_A_REASON = 5.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Slurm(Cluster):
    """Settings of a job of SLURM."""

    account: Text | None = None
    partition: Text | None = None
    qos: Text | None = None
    hours: Above0 | None = None
    """Time limit of one start, by default the partition's; the job saves before it, and is queued
    again."""
    signal_seconds: Positive = 120
    """Seconds before the limit at which SLURM sends SIGTERM, if no save was measured by then."""
    gpu_type: Text | None = None
    """Type of the GPUs as SLURM names it, such as h100."""
    modules: tuple[Text, ...] = ()
    """Environment modules to load."""
    setup: tuple[Text, ...] = ()
    """Lines of bash to run before the job on its first node, such as `source venv/bin/activate`."""
    container: Text | None = None
    """Image in which `finetune` is installed."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What starts the container."""
    mounts: tuple[Text, ...] = ()
    """Folders in the container, as OUTSIDE:INSIDE; those of the run and of the data are needed."""
    options: tuple[Text, ...] = Field(default=())
    """Further options of sbatch, such as --exclusive."""


def script(job: Submission[Slurm]) -> str:
    """The batch script of a job.

    Every start is `finetune launch --resume auto` on each node. If it ends with the status of an
    interruption, or was killed, the job is queued again, unless `job/stop` in its run directory
    exists. SLURM itself queues it again if a node is lost.
    `srun` sends SIGTERM to its tasks; the first that ends must not end the others, which save.
    `sbatch` does not hand its cores per task to `srun`, and with a number of tasks on a node it
    takes the fewest nodes of a range (SLURM 22.05).
    """
    cluster, stop = job.cluster, job.run.log.with_name("stop")
    gpus = cluster.gpus and ":".join([*([cluster.gpu_type] if cluster.gpu_type else []),
                                      str(cluster.gpus)])  # fmt: skip
    fewest = f"{job.min_machines}-" if job.min_machines else ""
    options = {
        "job-name": job.name, "nodes": f"{fewest}{cluster.nodes}",
        "gpus-per-node": gpus or None, "cpus-per-task": cluster.cores,
        "account": cluster.account, "partition": cluster.partition, "qos": cluster.qos,
        "time": cluster.hours and math.ceil(cluster.hours * 60),
        "signal": f"TERM@{cluster.signal_seconds}",
        "output": job.run.log, "open-mode": "append",
    }  # fmt: skip
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    cores = [f"--cpus-per-task={cluster.cores}"] if cluster.cores else []
    inside: list[str] = []
    if cluster.container and cluster.runtime == "pyxis":
        cores += [f"--container-image={cluster.container}"]
        cores += [f"--container-mounts={','.join(cluster.mounts)}"] if cluster.mounts else []
        cores += [f"--container-workdir={Path.cwd()}"]
    elif cluster.container:
        inside = ["apptainer", "exec", *(["--nv"] if cluster.gpus else [])]
        inside += ["--bind", ",".join([*cluster.mounts, str(Path.cwd())]), cluster.container]
    srun = shlex.join(["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *cores, *inside])
    end = '${end:+--end-by "$end"}'
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in (*lines, "--requeue", *cluster.options)),
        *([f"module load {shlex.join(cluster.modules)}"] if cluster.modules else []),
        *cluster.setup,
        'end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)',
        'end=$(date -d "${end:-none}" +%s 2>/dev/null)',
        f"{srun} {job.command(contained=cluster.container is not None)} {end}",
        "status=$?",
        f"again=$(( status == {Interrupted.exit_status} || status > 128 ))",
        f"if [ $again = 1 ] && [ ! -e {shlex.quote(str(stop))} ]; then",
        '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "fi",
        "exit $status",
        "",
    ])  # fmt: skip


def describe(job: Submission[Slurm]) -> str:
    names = "".join(f"# with {name} in the environment\n" for name in job.cluster.environment)
    return names + script(job)


def submit(job: Submission[Slurm]) -> Submitted:
    """Submit a job, after SLURM has checked that its partition can run it.

    Raises:
        FinetuneError: SLURM refuses it, or has a job of this name.
    """
    taken = ask("squeue", "--noheader", "--me", f"--name={job.name}", "--format=%i %T")
    if taken:
        number, state = taken.splitlines()[0].split(maxsplit=1)
        raise FinetuneError(
            f"job name '{job.name}': taken by job {number} ({state}); give another with --name"
        )
    text, number = script(job), ""
    try:
        ask("sbatch", "--test-only", given=text, env=job.environment)
        number = ask("sbatch", "--parsable", given=text, env=job.environment).partition(";")[0]
        _refuse_hopeless(number)
    except FinetuneError as error:
        if number:
            ask("scancel", number)
        names = ("partition", "account", "qos", "hours", "nodes", "gpus", "cores")
        asked = {name: getattr(job.cluster, name) for name in names}
        words = ", ".join(f"cluster.{name}={value}" for name, value in asked.items() if value)
        known = ask("sinfo", "--noheader", "--format=%R (%D nodes, %c cores, %G, %l)")
        raise FinetuneError(
            f"{error}; asked for {words}; partitions here: {', '.join(known.splitlines())}"
        ) from None
    return Submitted(number)


def _refuse_hopeless(number: str) -> None:
    """Refuse a job that SLURM accepted and will never start, as soon as it has a reason."""
    until = time.monotonic() + SECONDS_FOR_A_REASON
    while time.monotonic() < until:
        told = ask("squeue", "--noheader", f"--jobs={number}", "--format=%T %r")
        state, _, reason = told.partition(" ")
        if HOPELESS.search(reason):
            raise FinetuneError(f"slurm: job {number} would never start: {reason}")
        if state != "PENDING" or reason not in ("None", "Priority"):
            return
        time.sleep(0.2)


def status(record: dict[str, Any]) -> JobState:
    """The state of a job; SLURM forgets those that ended, and then refuses their number."""
    try:
        told = ask("squeue", "--noheader", f"--jobs={record['id']}", "--format=%T %r %S")
    except FinetuneError as error:
        if "Invalid job id" not in str(error):
            raise
        told = ""
    if not told:
        return JobState("ended")
    state, reason, start = told.splitlines()[0].split(maxsplit=2)
    found = STATES.get(state, "ended")
    expected = f", expected to start {start}" if start != "N/A" else ""
    return JobState(found, f"{reason}{expected}" if found == "queued" else state)


def cancel(record: dict[str, Any], run: Run) -> str:
    """Let a running job save and end without being queued again, or cancel a queued one."""
    number = record["id"]
    if status(record).state == "running":
        run.log.with_name("stop").touch()
        ask("scancel", "--signal=TERM", number)
        return f"job {number} of SLURM was asked to save and end"
    ask("scancel", number)
    return f"job {number} of SLURM is cancelled"


QUEUE = Queue(Slurm, describe, submit, status, cancel)
