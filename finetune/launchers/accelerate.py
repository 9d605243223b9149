"""Carry out a job through `accelerate launch`: a plan becomes a command, and the command a run."""

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

import psutil

from finetune import backend as backends
from finetune import catalog
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.launchers.job import Job, machines
from finetune.planner import Plan
from finetune.process import interpreter
from finetune.process.error_report import STATUS_FILE
from finetune.process.quiet import OF_A_LAUNCH
from finetune.process.signals import heeded
from finetune.runs.run import Run, write_json

LAUNCHER = "FINETUNE_LAUNCHER"
"""Variable with the process number of the launcher: when that is gone, a worker ends."""

SECONDS_TO_SAVE = 600
"""How long workers may take from a signal to their end, before torch's agent kills them."""

RECORDED_COLLECTIVES = 500
"""Length of torch's flight recorder, in which a lost rank can be seen."""

ARGUMENTS_REFUSED = 2
"""Exit status of `accelerate launch` itself for words that it cannot read."""

REPORT = re.compile(r"^Traceback \(most recent call last\)|torch/distributed/elastic/")
"""How the report of torch's agent, and of `accelerate launch` itself, begins."""

FAILED_WORKER = re.compile(
    r"rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)"
)
"""A worker that failed, in the report of torch's agent; below 0: by that signal (torch 2.13)."""

FAILED_ALONE = re.compile(r"CalledProcessError: .* died with <Signals\.(\w+): \d+>")
"""The only process, in the report of `accelerate launch` (accelerate 1.15)."""


def run(job: Job) -> None:
    """Carry out a job through `accelerate launch`.

    Raises:
        FinetuneError: a process refused its words; nothing was trained.
        TrainingFailure: the processes ended with an error.
        Interrupted: by SIGTERM, SIGINT or SIGHUP; what was trained is saved.
    """
    flags = list(job.flags)
    if job.max_restarts:
        flags = ["--max_restarts", str(job.max_restarts), *flags]
    if job.precision is not None:
        flags = ["--mixed_precision", backends.MIXED[job.precision], *flags]
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        recipe, status = Path(scratch) / "recipe.json", Path(scratch) / "status.json"
        write_json(recipe, catalog.to_fields(job.plan.recipe))
        words = ["train", str(recipe), "--output", str(job.run.root), *job.arguments]
        words += {True: ["--resume"], "auto": ["--resume", "auto"], False: []}[job.resume]
        command = build_command(job.plan, words, flags)
        here = max(1, job.plan.processes // machines(flags))
        threads = max(1, (os.cpu_count() or 1) // here)
        axes = job.plan.backend.axes.variables()
        _run(command, axes, job.run, status, threads, starts_again=bool(job.max_restarts))


def begin(
    words: Sequence[str], log: Path, threads: int = 1, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    """Start `finetune launch` with `words` in a session of its own, writing to `log`; no waiting.

    `threads` are those of each of its processes, where the environment does not say; `python` is
    the interpreter.
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


def build_command(settled: Plan, words: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The `accelerate launch` of a plan, running `finetune` with `words` in every process.

    As a module of its own, which keeps ports on the loopback: the script `accelerate` loads all its
    other commands too, with transformers, which is a second of processor time.
    """
    command = interpreter.python("-m", "finetune.process.loopback")
    command += ["--config_file", str(settled.backend.path)]
    command += ["--num_processes", str(settled.processes)]
    mesh, axes = settled.mesh, settled.backend.axes
    if settled.backend.shard_size is not None or axes.any:
        command += ["--parallelism_config_dp_replicate_size", str(mesh.replicate)]
        command += ["--parallelism_config_dp_shard_size", str(mesh.shard)]
    if axes.any:
        command += ["--parallelism_config_tp_size", str(axes.tensor)]
        command += ["--parallelism_config_cp_size", str(axes.context)]
        command += ["--parallelism_config_sp_size", str(axes.sequence)]
    if machines(flags) > 1:
        command += settled.traits.several_machines
    if not any(flag.startswith("--main_process_port") for flag in flags):
        command += ["--main_process_port", str(free_port())]
    return [*command, *flags, "-m", "finetune", *words]


EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that Linux gives to connections by itself."""
PORTS = 20_000
_searches = itertools.count()


def free_port() -> int:
    """A port that nobody listens on, nor will until a job does that starts now.

    Seconds lie between this and the job's own use of it, in which the system may give any port of
    its own range to a connection, and another launch may look for one: the search keeps below that
    range, and starts from the number of this process.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):  # another system than Linux
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
    command: list[str],
    axes: dict[str, str],
    run: Run,
    status: Path,
    threads: int,
    starts_again: bool,
) -> None:
    """Run to the end, passing its output on; a worker's own error is raised as such.

    `axes` are variables of what Accelerate does not hand on to a worker.

    A signal to this process goes on to the job, which has a session of its own: torch's agent
    hands it to each worker and waits for them, by default for 30 s, too short for a large
    checkpoint (torch 2.13).
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE),
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_COLLECTIVES),
    }
    # What a scheduler or another launch left would be taken for this launch's own.
    left = (*OF_A_LAUNCH, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    inherited = {name: value for name, value in os.environ.items() if name not in left}
    environment |= inherited | axes | {STATUS_FILE: str(status), LAUNCHER: str(os.getpid())}
    report, held = list[str](), list[str]()
    with _started(command, interpreter.environment(environment)) as (process, heard):
        assert process.stderr is not None
        for line in process.stderr:
            if report or REPORT.search(line):
                report.append(line)
            # What torch's agent prints after a worker has said what is wrong, or after a signal, is
            # a traceback of its own, of no use to a person. What may be its report of a lost worker
            # is held back until that is known.
            if not status.exists() and not heard:
                held.append(line)
                if starts_again or not report:
                    sys.stderr.write(held.pop())
        code = process.wait()
    lost = None if heard else lost_worker("".join(report))
    told = json.loads(status.read_text()) if code and status.exists() else None
    if lost is None:
        sys.stderr.writelines(held)
    elif code:
        standing = f"{lost}; {run.standing()}"
        if told is None or told["status"] == Interrupted.exit_status:  # the agent ends the others
            raise TrainingFailure(standing)
        if not any(lost.partition(" (")[0] in problem for problem in told["problems"]):
            told["problems"].append(standing)
    if told is not None:
        kinds = {kind.exit_status: kind for kind in (FinetuneError, Interrupted)}
        raise kinds.get(told["status"], TrainingFailure)(*told["problems"])
    if code and heard:
        raise Interrupted(
            f"interrupted by {heard[0]}; no process said that it saved: continue with --resume auto"
        )
    if code == ARGUMENTS_REFUSED:
        raise FinetuneError(
            "`accelerate launch` does not know these flags; its answer is above; those of this "
            "command: finetune launch --help"
        )
    if code:
        raise TrainingFailure(f"`accelerate launch` ended with status {code}; its output is above")


def lost_worker(report: str) -> str | None:
    """Which worker a signal ended that nobody here has sent, by the report of torch's agent.

    The agent ends the others with SIGTERM, and a worker whose collective fails may abort: those
    are no causes while there is another.

    Args:
        report: what the agent, or `accelerate launch` of a single process, wrote to stderr.
    """
    found = [tuple(map(int, worker)) for worker in FAILED_WORKER.findall(report)]
    lost = [worker for worker in found if worker[1] < 0 and -worker[1] != signal.SIGTERM]
    aborted = [worker for worker in lost if -worker[1] == signal.SIGABRT]
    if aborted == lost and any(code > 0 for _, code, _ in found):
        return None  # its own error is above
    if lost:
        rank, code, pid = min(lost, key=aborted.__contains__)
        who = f"rank {rank} (process {pid} on {socket.gethostname()})"
        return f"{who} ended without a word, by {_name_of(-code)}"
    alone = FAILED_ALONE.search(report)
    if alone is not None and alone[1] != "SIGTERM":
        return f"the process that trained ended without a word, by {alone[1]}"
    return None


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """A job. Within it, signals to this process go to the job instead; at its end, it has ended.

    Yields it with the names of the signals that came. Torch's agent hands one on by itself; what
    starts a single process in its place does not, and would leave it behind: that process gets it.
    """
    heard: list[str] = []
    jobs: list[subprocess.Popen[str]] = []

    def send(number: int, _: object) -> None:
        heard.append(signal.Signals(number).name)
        for job in jobs:
            (worker_alone(job.pid) or job).send_signal(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, send) for number in heeded()} if main else {}
    try:
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        jobs.append(process)
        if heard:  # before it was there
            process.terminate()
        yield process, heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                job.wait()


def worker_alone(pid: int) -> psutil.Process | None:
    """The one process that `accelerate launch` runs without torch's agent, once it is there."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if os.getpgid(child.pid) == pid and "train" in child.cmdline():
                return child
    return None
