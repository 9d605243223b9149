"""Run a job with `accelerate launch`: build the command, start it, and report failed workers."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetune import backend as backends
from finetune import catalog
from finetune.backend.axes import KEYS, ROTATION, SCHEDULE, SECTION
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.launchers.job import Job, machines
from finetune.planner import Plan
from finetune.process import interpreter
from finetune.process.error_report import STATUS_FILE
from finetune.process.quiet import OF_A_LAUNCH
from finetune.process.signals import handled_signals, name_of
from finetune.runs.limits import usable_cores
from finetune.runs.run import Run, write_json

LAUNCHER = "FINETUNE_LAUNCHER"
"""Environment variable with the process id of the launcher; workers exit when it is gone."""

SECONDS_TO_SAVE = 600
"""Seconds from a signal until torch's agent kills workers that have not exited."""

RECORDED_COLLECTIVES = 500
"""Number of collectives in torch's flight recorder, which shows a lost rank."""

ARGUMENTS_REFUSED = 2
"""Exit status of `accelerate launch` itself for invalid arguments."""

OWN = {
    "--config_file": "--backend FILE",
    "--num_processes": "--processes N",
    **{f"--{SECTION}_{key}_size": f"--{field} N" for key, field in KEYS.items()},
    f"--{SECTION}_{SCHEDULE}": "--schedule NAME",
    f"--{SECTION}_{ROTATION}": "--rotation NAME",
    f"--{SECTION}_dp_shard_size": "--shard-size N (hsdp), or --processes N",
    f"--{SECTION}_dp_replicate_size": "--processes N",
}
"""Flags of `accelerate launch` that a plan sets -> the option of `finetune launch` to use."""

REPORT = re.compile(r"^Traceback \(most recent call last\)|torch/distributed/elastic/")
"""Start of the report of torch's agent, or of `accelerate launch` itself."""

FAILED_WORKER = re.compile(
    r"rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)"
)
"""A failed worker in the report of torch's agent; a negative exit code is a signal (torch 2.13)."""

FAILED_ALONE = re.compile(r"CalledProcessError: .* died with <Signals\.(\w+): \d+>")
"""A single process ended by a signal, in the report of `accelerate launch` (accelerate 1.15)."""


def run(job: Job) -> None:
    """Run a job with `accelerate launch`.

    Raises:
        FinetuneError: a flag contradicts the plan, or a process rejected its arguments; nothing was
            trained.
        TrainingFailure: the processes ended with an error.
        Interrupted: stopped by SIGTERM, SIGINT or SIGHUP; training progress is saved.
    """
    flags = list(job.flags)
    names = [each.partition("=")[0].replace("-", "_").replace("__", "--", 1) for each in flags]
    if twice := [
        f"{name}: finetune launch sets it from the plan; use {OWN[name]}"
        for name in names
        if name in OWN
    ]:
        raise FinetuneError(*twice)
    if job.max_restarts:
        flags = ["--max_restarts", str(job.max_restarts), *flags]
    if machines(flags) > 1:
        flags = ["--rdzv_conf", f"timeout={job.join_minutes * 60:.0f}", *flags]
    if job.precision is not None:
        flags = ["--mixed_precision", backends.MIXED[job.precision], *flags]
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        recipe, status = Path(scratch) / "recipe.json", Path(scratch) / "status.json"
        write_json(recipe, catalog.to_fields(job.plan.recipe))
        words = ["train", str(recipe), "--output", str(job.run.root), *job.arguments]
        words += {True: ["--resume"], "auto": ["--resume", "auto"], False: []}[job.resume]
        command = build_command(job.plan, words, flags)
        here = max(1, job.plan.processes // machines(flags))
        threads = max(1, usable_cores() // here)
        axes = job.plan.backend.axes.variables()
        _run(command, axes, job.run, status, threads, bool(job.max_restarts))


def begin(
    words: Sequence[str], log: Path, threads: int = 1, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    """Start `finetune launch` in a new session, without waiting for it.

    Args:
        words: arguments of `finetune launch`.
        log: file for its output.
        threads: threads per process, unless set in the environment.
        python: the interpreter.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name != STATUS_FILE}
    with log.open("wb") as file:
        return subprocess.Popen(
            [python, "-P", "-m", "finetune", "launch", *words],
            env=interpreter.environment({"OMP_NUM_THREADS": str(threads)} | kept),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def build_command(plan: Plan, words: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The `accelerate launch` command of a plan, which runs `finetune WORDS` in each process.

    It runs `finetune.process.loopback`, which binds ports to the loopback interface. The script
    `accelerate` would import its other commands and transformers, a second of CPU time.
    """
    command = interpreter.python("-m", "finetune.process.loopback")
    command += ["--config_file", str(plan.backend.path)]
    command += ["--num_processes", str(plan.processes)]
    mesh, axes = plan.mesh, plan.backend.axes
    if plan.backend.shard_size is not None or axes.any:
        command += ["--parallelism_config_dp_replicate_size", str(mesh.replicate)]
        command += ["--parallelism_config_dp_shard_size", str(mesh.shard)]
    if axes.any:
        command += ["--parallelism_config_tp_size", str(axes.tensor)]
        command += ["--parallelism_config_cp_size", str(axes.context)]
        command += ["--parallelism_config_sp_size", str(axes.sequence)]
    if axes.context > 1:
        command += [f"--{SECTION}_{ROTATION}", axes.rotation]
    if machines(flags) > 1:
        command += plan.traits.several_machines
    if not any(flag.startswith("--main_process_port") for flag in flags):
        command += ["--main_process_port", str(free_port())]
    return [*command, *flags, "-m", "finetune", *words]


EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last ephemeral port of Linux."""
PORTS = 20_000
_searches = itertools.count()


def free_port() -> int:
    """A free port that is likely to stay free until a job that starts now uses it.

    This takes seconds, in which the system may assign any ephemeral port to a connection, and
    another launch may search for a port. The search therefore stays below the ephemeral range and
    starts at a position derived from the id of this process.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
        first = int(EPHEMERAL.read_text().split()[0])
        candidates = range(max(first - PORTS, 1024), first)
        if len(candidates) == PORTS:
            turn = (os.getpid() + next(_searches)) % PORTS
            for port in itertools.chain(candidates[turn:], candidates[:turn]):
                if _is_free(port):
                    return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _run(
    command: list[str], axes: dict[str, str], run: Run, status: Path, threads: int, restarts: bool
) -> None:
    """Run the command until it ends, forward its output, and raise a worker's error.

    `axes` are environment variables for settings that Accelerate does not pass to workers.

    A signal to this process is forwarded to the job, which runs in its own session. Torch's agent
    forwards it to each worker and waits for them, by default 30 s, which is too short for a large
    checkpoint (torch 2.13).
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE),
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_COLLECTIVES),
    }
    # Variables left by a scheduler or another launch would be mistaken for those of this launch.
    left = (*OF_A_LAUNCH, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    inherited = {name: value for name, value in os.environ.items() if name not in left}
    environment |= inherited | axes | {STATUS_FILE: str(status), LAUNCHER: str(os.getpid())}
    report, pending = list[str](), list[str]()
    with _started(command, interpreter.environment(environment)) as (process, signals):
        assert process.stderr is not None
        for line in process.stderr:
            if report or REPORT.search(line):
                report.append(line)
            # After a worker has reported an error, or after a signal, torch's agent prints its own
            # traceback, which does not help the user. Lines that may be its report of a lost worker
            # are held back until this is known.
            if not status.exists() and not signals:
                pending.append(line)
                if restarts or not report:
                    sys.stderr.write(pending.pop())
        code = process.wait()
    lost = None if signals else lost_worker("".join(report))
    outcome = json.loads(status.read_text()) if code and status.exists() else None
    if lost is None:
        sys.stderr.writelines(pending)
    elif code:
        standing = f"{lost}; {run.standing()}"
        # The agent ends the others.
        if outcome is None or outcome["status"] == Interrupted.exit_status:
            raise TrainingFailure(standing)
        if not any(lost.partition(" (")[0] in problem for problem in outcome["problems"]):
            outcome["problems"].append(standing)
    if outcome is not None:
        kinds = {kind.exit_status: kind for kind in (FinetuneError, Interrupted)}
        raise kinds.get(outcome["status"], TrainingFailure)(*outcome["problems"])
    if code and signals:
        raise Interrupted(
            f"interrupted by {signals[0]}; no process reported a save: continue with --resume auto"
        )
    if code == ARGUMENTS_REFUSED:
        raise FinetuneError(
            "`accelerate launch` does not accept these flags; its message is above; for the flags "
            "of this command: finetune launch --help"
        )
    if code:
        raise TrainingFailure(f"`accelerate launch` ended with status {code}; its output is above")


def lost_worker(report: str) -> str | None:
    """Find the worker that was ended by a signal from outside, in the report of torch's agent.

    The agent ends the other workers with SIGTERM, and a worker whose collective fails may abort;
    these are not the cause if there is another.

    Args:
        report: stderr of the agent, or of `accelerate launch` with a single process.

    Returns:
        A description of the worker and the signal, or None.
    """
    found = [tuple(map(int, worker)) for worker in FAILED_WORKER.findall(report)]
    lost = [worker for worker in found if worker[1] < 0 and -worker[1] != signal.SIGTERM]
    aborted = [worker for worker in lost if -worker[1] == signal.SIGABRT]
    if aborted == lost and any(code > 0 for _, code, _ in found):
        return None  # the worker's own error is above
    if lost:
        rank, code, pid = min(lost, key=aborted.__contains__)
        who = f"rank {rank} (process {pid} on {socket.gethostname()})"
        return f"{who} was killed by {name_of(-code)}"
    alone = FAILED_ALONE.search(report)
    if alone is not None and alone[1] != "SIGTERM":
        return f"the training process was killed by {alone[1]}"
    return None


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Start a job, forward signals of this process to it, and make sure that it ends.

    Yields the process and the names of the signals received. `finetune.process.loopback` and
    torch's agent forward them to the workers.
    """
    heard: list[str] = []
    jobs: list[subprocess.Popen[str]] = []

    def send(number: int, _: object) -> None:
        heard.append(signal.Signals(number).name)
        if heard[:-1] and number != signal.SIGINT:
            return  # a second one would end torch's agent, which waits for the workers to save
        for job in jobs:
            job.send_signal(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, send) for number in handled_signals()} if main else {}
    try:
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        jobs.append(process)
        if heard:  # the signal came before the process was started
            process.terminate()
        yield process, heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                job.wait()
