"""Read the launcher's environment variables: rank, world size, address of the rendezvous."""

import datetime
import os
import sys
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.process.quiet import OF_MPI

RENDEZVOUS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that each process of a job has in addition to WORLD_SIZE."""


def started(named: bool) -> int | None:
    """Number of processes started by torchrun, `notebook_launcher` or srun; None if not launched.

    Args:
        named: whether the command names a backend of several processes. This is required if only
            the variables indicate that there are more processes.

    Raises:
        FinetuneError: variables of a launch are set, but no launcher started this process.
    """
    refuse_mpi()
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise FinetuneError(
            f"WORLD_SIZE={text}: expected a whole number of at least 1; unset it, or start the "
            "processes with finetune launch, accelerate launch or torchrun"
        )
    count, by_torchrun = int(text), "TORCHELASTIC_RUN_ID" in os.environ
    if count == 1:
        return 1 if by_torchrun and named else None
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if by_torchrun or (named and not missing):
        return count
    lacks = f"{', '.join(missing)} not set" if missing else "TORCHELASTIC_RUN_ID not set"
    way = "" if missing else ", name the backend (--backend ddp) if another launcher did"
    raise FinetuneError(
        f"WORLD_SIZE={count}: set in the environment, but neither accelerate launch nor torchrun "
        f"started this process ({lacks}), and it would wait for {count - 1} others; start all of "
        f"them with finetune launch --backend ddp --processes {count} or torchrun{way}, or unset "
        "WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to train in this process alone"
    )


def refuse_mpi() -> None:
    """Refuse variables of MPI without WORLD_SIZE: Accelerate would wait for the other processes.

    Raises:
        FinetuneError: a variable in `OF_MPI` counts several processes, and WORLD_SIZE is not set.
    """
    found = [name for name in OF_MPI if os.environ.get(name, "1") not in ("", "1")]
    if found and "WORLD_SIZE" not in os.environ:
        raise FinetuneError(
            f"{found[0]}={os.environ[found[0]]}: set by mpirun or srun, which do not start the "
            "processes of a training here; start them with finetune launch or torchrun, or unset "
            f"{' and '.join(found)} to train in this process alone"
        )


def announce_wait(timeout: datetime.timedelta) -> None:
    """Print on stderr that this process waits for others that no launcher monitors, and how long.

    A launcher monitors the processes of its own machine: of several, one process of each prints.
    """
    monitored = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & set(os.environ)
    _, here = local_rank_and_count()
    if world() > 1 and not (monitored and (here >= world() or local_rank())):
        host, port = meeting_point()
        print(
            f"rank {rank()} of {world()}: waiting for the other processes at {host}:{port}, for "
            f"at most {timeout.total_seconds() / 60:g} min (--timeout)",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def rank() -> int:
    """Rank of this process in the job; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank of this process among the processes of the job on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world() -> int:
    """Number of processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def neighbours() -> int:
    """Number of processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank_and_count() -> tuple[int, int]:
    """Rank and number of processes on this machine; of the whole job if LOCAL_WORLD_SIZE is unset.

    srun, for example, does not set it.
    """
    is_set = "LOCAL_WORLD_SIZE" in os.environ
    return (local_rank(), neighbours()) if is_set else (rank(), world())


def visible_gpus() -> str | None:
    """Value of CUDA_VISIBLE_DEVICES, the GPUs that this process may use; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def meeting_point() -> tuple[str, int]:
    """Host and port of the rendezvous store of the job."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def restarts() -> int:
    """Number of times torch's elastic agent has restarted the processes of this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher() -> int | None:
    """Process id of the `finetune launch` that waits for this process; None if there is none."""
    number = os.environ.get("FINETUNE_LAUNCHER")
    return int(number) if number else None


def launcher_arguments() -> list[str]:
    """Arguments of the `accelerate launch` that started this process, flags with underscores."""
    import psutil  # a slow import that most commands do not need

    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
        except psutil.Error:
            return []
        if (given := launch_words(words)) is not None:
            return given
    return []


def launch_words(command: list[str]) -> list[str] | None:
    """Arguments that a command passes to `accelerate launch`, split at `=`; None for others.

    Recognizes `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch` and
    this package's own module; each accepts flags with dashes or underscores.
    """
    for place, word in enumerate(command):
        name, before = Path(word).name, Path(command[place - 1]).name if place else ""
        if (
            name in ("accelerate-launch", "accelerate.commands.launch", "finetune.process.loopback")
            or (name == "launch" and "accelerate" in before)
            or word.endswith("accelerate/commands/launch.py")
        ):
            parts = [part for given in command[place + 1 :] for part in given.split("=", 1)]
            return [f"--{p[2:].replace('-', '_')}" if p.startswith("--") else p for p in parts]
    return None
