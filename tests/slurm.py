"""A real SLURM of two nodes on the loopback interface, which a test starts and ends.

`python tests/slurm.py 20` preempts a run 20 times at moments drawn from its whole life, and
compares it bit for bit with one that was never stopped.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from conftest import ROOT, build_tiny, end_tree, environment, write_recipe
from faulty import steps_made

from finetune.launchers.slurm import STATES
from finetune.runs.attempts import cost
from finetune.runs.run import Run, read_object
from finetune.verification.proofs.runs import family_of

PLACE = os.getpid() % 250 + 1
"""Gives each SLURM of one machine its own addresses, ports and numbers of jobs."""
NODES = (f"127.0.{PLACE}.1", f"127.0.{PLACE}.2")
"""Names of the nodes, which are addresses, so that every process finds machine 0."""
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
FIRST_PORT = 16_000 + 3 * PLACE
SECONDS = 240
"""Seconds in which the state of a job changes: it waits for `cred_expire`, and this machine."""

CONFIGURATION = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
FirstJobId={job}
SlurmdTimeout=6
MessageTimeout=5
KillWait=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes}.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=owned Nodes=ALL AllowAccounts=project MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=short Nodes=ALL MaxTime=10 State=UP PriorityTier=1
"""  # noqa: E501


def missing() -> str | None:
    """Why no SLURM can be started here; None if one can."""
    if os.geteuid() != 0:
        return "a SLURM on one machine needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    text = "apt-get install --no-install-recommends slurm-wlm munge"
    return f"{', '.join(lacking)}: not found; {text}" if lacking else None


@dataclasses.dataclass
class Slurm:
    """A running SLURM."""

    folder: Path
    python: str = sys.executable
    """The interpreter of its jobs."""
    nodes: dict[str, "subprocess.Popen[bytes]"] = dataclasses.field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        env = os.environ | self.env
        return subprocess.run(
            words, env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    def start_node(self, name: str) -> None:
        self.nodes[name] = daemon(
            ["slurmd", "-D", "-N", name], self.folder / f"{name}.out", self.env
        )

    def lose_node(self, name: str) -> None:
        """Freeze a node with all that runs on it: no connection of it is closed."""
        for pid in self.processes(name):
            os.kill(pid, signal.SIGSTOP)

    def bring_back(self, name: str) -> None:
        """Start a lost node again."""
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.pop(name).wait()
        self.start_node(name)

    def processes(self, name: str) -> list[int]:
        steps = [each.pid for pid in steps_of(name) for each in family_of(pid)]
        return [self.nodes[name].pid, *dict.fromkeys(steps)]

    def kill_job(self) -> None:
        """Kill the tasks of the only job on each node, with all that they started."""
        for pid in (pid for node in NODES for pid in steps_of(node)):
            with contextlib.suppress(psutil.Error):
                words = psutil.Process(pid).cmdline()
                if "launch" in words and words[0] != "srun":
                    end_tree(pid)

    def state(self, job: str) -> str:
        """State of a job; empty after its end."""
        found = self.ask("squeue", "--noheader", "--states=all", "--format=%i %T")
        states = dict(line.split() for line in found.splitlines())
        return states.get(job, "")

    def wait(self, happened: Callable[[], bool], seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < until, self.ask("squeue", "--states=all")
            time.sleep(0.2)

    def preempt(self, job: str) -> None:
        """Take both nodes from a job, by a short job of a higher partition."""
        words = ["--parsable", "--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null"]
        other = self.ask("sbatch", *words, "--wrap=true")
        self.wait(lambda: self.state(other) not in ("PENDING", "RUNNING"))

    def submit(self, finetune: Callable[..., object], *words: str | Path) -> str:
        """`finetune launch` on both nodes; returns the number of the job."""
        output = Path(words[words.index("--output") + 1])
        finetune(
            "launch", *words, "--launcher", "slurm", "cluster.nodes=2", "cluster.partition=low",
            f"cluster.command={self.python} -P -m finetune", env=self.env,
        ).passed()  # fmt: skip
        return read_object(Run(output).job)["id"]


def steps_of(node: str) -> list[int]:
    """Processes of the steps that run on a node."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (place / "environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in variables:
                found.append(int(place.name))
    return found


def daemon(words: list[str], log: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env=os.environ | env,
        )  # fmt: skip


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Start a SLURM of two nodes, and end it with all of its jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    text = CONFIGURATION.format(
        folder=folder, host=socket.gethostname(), port=FIRST_PORT, first=FIRST_PORT + 1,
        last=FIRST_PORT + 2, job=40 * PLACE, nodes=f"127.0.{PLACE}",
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    made, daemons = Slurm(folder), []
    try:
        daemons.append(daemon(
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
             f"--key-file={key}", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed",
             f"--log-file={folder}/munge.log"],
            folder / "munged.out", {},
        ))  # fmt: skip
        made.wait((folder / "munge.socket").exists, 30)
        daemons.append(daemon(["slurmctld", "-D", "-c"], folder / "slurmctld.out", made.env))
        for node in NODES:
            made.start_node(node)
        ready = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
        made.wait(lambda: answer(made, ready) == "2", 60)
        yield made
        made.ask("scancel", "--full", "--signal=KILL", "--user=root")
        made.ask("scancel", "--user=root")
    finally:
        for node in NODES:
            for pid in steps_of(node):
                end_tree(pid)
        for each in [*made.nodes.values(), *daemons]:
            end_tree(each.pid)
            each.wait()


def answer(slurm: Slurm, words: list[str]) -> str:
    with contextlib.suppress(subprocess.CalledProcessError):
        return slurm.ask(*words)
    return ""


def preempted(
    slurm: Slurm, run: Run, job: str, times: int, seed: int, longest: float = 12.0
) -> list[tuple[float, int]]:
    """Preempt a job at moments drawn from its life: half of them after its start has made a step.

    Args:
        longest: seconds from the start, or from its first step, to the last moment.

    Returns:
        For each start, the time at which SLURM ran the job, and the steps made when it was taken.
    """
    drawn, moments = random.Random(seed), list[tuple[float, int]]()
    for _ in range(times):
        slurm.wait(lambda: slurm.state(job) == "RUNNING")
        begun, before = time.time(), steps_made(run)
        if drawn.random() < 0.5:
            slurm.wait(
                lambda before=before: steps_made(run) > before or slurm.state(job) != "RUNNING"
            )
        time.sleep(drawn.uniform(0, longest))
        if slurm.state(job) != "RUNNING":
            break
        moments.append((begun, steps_made(run)))
        print(*moments[-1], file=sys.stderr, flush=True)
        slurm.preempt(job)
        slurm.wait(lambda: slurm.state(job) in ("PENDING", "RUNNING", "COMPLETED"))
    return moments


def files_of(run: Run) -> dict[str, bytes]:
    """The bytes of a result, which equal runs have in common."""
    return {each.name: each.read_bytes() for each in run.final.glob("*.safetensors")}


def curve(run: Run) -> list[tuple[int, float, float]]:
    found = [(each["step"], each["loss"], each["grad_norm"]) for each in run.read_metrics("train")]
    assert [step for step, *_ in found] == list(range(1, len(found) + 1))
    return found


def main(times: int) -> None:
    from conftest import run_command

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = build_tiny(folder / "tiny")
        sections = {"max_steps": 60 * times, "saving": {"every": 50}, "evaluation": {"every": 200}}
        recipe = write_recipe(folder / "r.json", tiny.fields(**sections))
        shared = ["--backend", "fsdp_full_shard", "--precision", "fp32", "--no-plot"]

        def finetune(*words: str | Path, env: dict[str, str] | None = None) -> object:
            return run_command(
                [sys.executable, "-m", "finetune", *map(str, words)], folder, env=env
            )

        straight, run = Run(folder / "straight"), Run(folder / "run")
        finetune("launch", recipe, *shared, "--processes", "2", "--output", straight.root)
        with running(folder / "slurm") as slurm:
            job = slurm.submit(finetune, recipe, *shared, "--output", run.root)
            moments = preempted(slurm, run, job, times, seed=times)
            slurm.wait(lambda: STATES.get(slurm.state(job), "ended") == "ended", 1200)
        stepped = [each["time"] for each in run.read_metrics("train")]
        begun = [*(start for start, _ in moments), math.inf]
        first = [
            min(taken) - start
            for start, until in itertools.pairwise(begun)
            if (taken := [each for each in stepped if start < each < until])
        ]
        print(json.dumps({
            "preempted": len(moments), "after steps": [steps for _, steps in moments],
            "steps": len(stepped), "lost": cost(run).lost_steps,
            "seconds from SLURM's start to a new step": sorted(round(each, 1) for each in first),
            "equal": curve(run) == curve(straight) and files_of(run) == files_of(straight),
        }))  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ |= environment(Path(tempfile.gettempdir()))
    main(int(sys.argv[1]))
