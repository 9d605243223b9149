"""Start a job on hosts by ssh, one `finetune launch` on each, and wait for its end."""

import concurrent.futures
import contextlib
import os
import queue
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.errors import FinetuneError, Interrupted, TrainingFailure, refuse
from finetune.launchers.accelerate import free_port
from finetune.launchers.cluster import Cluster
from finetune.launchers.submission import JobState, Queue, Submission, Submitted, ask
from finetune.process import interpreter
from finetune.process.signals import handled_signals
from finetune.recipe.field_types import STRICT, Positive, Text
from finetune.runs.run import Run
from finetune.version import __version__

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
NO_CONNECTION = 255
"""Exit status of ssh without a connection, or after it broke."""
BEFORE = """\
while read -r line && [ -n "$line" ]; do export "$line"; done
cd {folder} || exit 2
"""
"""Sets the variables with which standard input begins, up to an empty line."""
WATCHED = """\
exec 3<&0
{command} </dev/null &
pid=$!
(while read -r line <&3; do :; done; kill -TERM $pid) >/dev/null 2>&1 &
wait $pid
"""
"""Runs a command that saves and ends at the end of its input, and so of the connection."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hosts(Cluster):
    """Settings of a job on hosts that share a disk and the path of the toolkit."""

    hosts: tuple[Text, ...] = Field(min_length=1)
    """Names for ssh; the first is the address at which the others meet."""
    ssh: tuple[Text, ...] = ()
    """Options of ssh, such as -p 2222; a host's own are in ~/.ssh/config."""
    address: Text | None = None
    """Address of the first host for the others, if its name for ssh is not one."""
    port: Positive | None = None
    """Port at which they meet; by default a free one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", len(self.hosts))


def _ssh(job: Submission[Hosts], host: str, words: str) -> list[str]:
    """The command that runs lines of sh in this folder of a host."""
    script = BEFORE.format(folder=shlex.quote(str(Path.cwd()))) + words
    return [*SSH, *job.cluster.ssh, host, f"exec sh -c {shlex.quote(script)}"]


def _commands(job: Submission[Hosts], hosts: Sequence[str]) -> dict[str, str]:
    """The command of each host."""
    head = hosts[0].rpartition("@")[2]
    if job.cluster.address and hosts[0] == job.cluster.hosts[0]:
        head = job.cluster.address
    place = f"--main_process_ip {head} --main_process_port {job.cluster.port or free_port()}"
    return {
        host: f"{job.command()} --num_machines {len(hosts)} --machine_rank {rank} {place}"
        for rank, host in enumerate(hosts)
    }


def describe(job: Submission[Hosts]) -> str:
    return "\n".join(map(": ".join, _commands(job, job.cluster.hosts).items()))


def submit(job: Submission[Hosts]) -> Submitted:
    """Ask every host for its version, and whether it sees the run directory.

    Raises:
        FinetuneError: a host cannot be reached, or has another version or another disk.
    """
    hosts = job.cluster.hosts
    if len(set(hosts)) < len(hosts):
        raise FinetuneError(f"cluster.hosts: {', '.join(hosts)}: one of them occurs twice")
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        problems = list(pool.map(lambda host: _problem(job, host), hosts))
    there = [host for host, problem in zip(hosts, problems, strict=True) if not problem]
    if len(there) < (job.min_machines or len(hosts)):
        refuse(filter(None, problems))
    for problem in filter(None, problems):
        print(f"left out     {problem}", flush=True)
    return Submitted(f"{os.getpid()}@{socket.gethostname()}", lambda: _run(job, there))


def _problem(job: Submission[Hosts], host: str) -> str | None:
    """Why a host cannot take part."""
    command = job.command().split(" launch ")[0]
    seen = f"{command} --version\ntest -f {shlex.quote(str(job.recipe))} || echo unseen"
    try:
        told = ask(*_ssh(job, host, seen), given=_variables(job)).split()
    except FinetuneError as error:
        return f"{host}: {error}"
    if told[:2] != ["finetune", __version__]:
        return f"{host}: '{' '.join(told)}' instead of finetune {__version__}; install the same"
    if "unseen" in told:
        return f"{host}: does not see {job.recipe}; choose an --output on a disk that all share"
    return None


def _variables(job: Submission[Hosts]) -> str:
    found = interpreter.environment(job.cluster.environment)
    return "".join(f"{name}={value}\n" for name, value in found.items()) + "\n"


def _run(job: Submission[Hosts], hosts: Sequence[str]) -> None:
    """Run the job to its end, and print its output after the names of the hosts.

    Raises:
        FinetuneError, TrainingFailure, Interrupted: by the status of the first host that ended
            otherwise than with 0.
    """
    inputs: list[IO[str]] = []
    ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    heard: list[str] = []

    def stop() -> None:
        for each in inputs:
            with contextlib.suppress(OSError):  # its host has ended
                each.close()

    def hear(number: int, _: object) -> None:
        heard.append(signal.Signals(number).name)
        stop()

    def follow(host: str, command: str, log: IO[str]) -> None:
        with subprocess.Popen(
            _ssh(job, host, WATCHED.format(command=command)), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            inputs.append(process.stdin)
            with contextlib.suppress(OSError):
                process.stdin.write(_variables(job))
                process.stdin.flush()
            if heard:
                stop()
            for line in process.stdout:
                print(f"{host}: {line}", end="", flush=True)
                print(f"{host}: {line}", end="", file=log, flush=True)
            ended.put((host, process.wait()))

    before = {number: signal.signal(number, hear) for number in handled_signals()}
    failed: list[tuple[str, int]] = []
    try:
        with job.run.log.open("a") as log:
            for host, command in _commands(job, hosts).items():
                threading.Thread(target=follow, args=(host, command, log), daemon=True).start()
            for _ in hosts:
                host, status = ended.get()
                if status:
                    failed.append((host, status))
                    stop()  # the others save if they can, and end
    finally:
        stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        host, status = failed[0]
        kinds = {kind.exit_status: kind for kind in (FinetuneError, Interrupted)}
        text = "lost its connection" if status == NO_CONNECTION else f"ended with status {status}"
        why = f"interrupted by {heard[0]}: " if heard else ""
        raise kinds.get(status, TrainingFailure)(
            f"{why}{host} {text}; its output is above; {job.run.standing()}"
        )


def _launcher(record: dict[str, Any]) -> psutil.Process | None:
    """The process that waits for the hosts; None after its end."""
    number, _, host = record["id"].partition("@")
    if host != socket.gethostname():
        raise FinetuneError(f"it was started on {host}; ask there")
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(int(number))
        return found if found.create_time() < record["submitted"] else None
    return None


def status(record: dict[str, Any]) -> JobState:
    return JobState("running" if _launcher(record) else "ended", "by ssh")


def cancel(record: dict[str, Any], run: Run) -> str:
    """Let the hosts save and end."""
    if (process := _launcher(record)) is not None:
        process.terminate()
    return f"{run.root}: its hosts were asked to save and end"


QUEUE = Queue(Hosts, describe, submit, status, cancel)
