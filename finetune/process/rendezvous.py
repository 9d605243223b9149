"""How this process finds the others of its job: the variables that a launcher sets."""

import os
import sys
from pathlib import Path

from finetune.errors import FinetuneError

RENDEZVOUS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that each process of a job has, besides WORLD_SIZE."""


def started(named: bool) -> int | None:
    """How many processes torchrun, `notebook_launcher` or srun started; None where this is alone.

    Args:
        named: whether the command names a backend of several processes, as one has to where
            nothing but the variables says that there are more processes.

    Raises:
        FinetuneError: variables of a launch are set, but no launcher started this process.
    """
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


def announce_wait() -> None:
    """Say on stderr whom this process waits for, where no launcher watches over the others."""
    if world() > 1 and not {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):
        host, port = meeting_point()
        print(
            f"rank {rank()} of {world()}: waiting for the other processes at {host}:{port}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def rank() -> int:
    """This process's number in the job, 0 where there is only one."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number among those of the job on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world() -> int:
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def neighbours() -> int:
    """How many of them run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def among_neighbours() -> tuple[int, int]:
    """This process's number on its machine and how many run there; of all where that is not told.

    srun, for one, tells it to none of them.
    """
    told = "LOCAL_WORLD_SIZE" in os.environ
    return (local_rank(), neighbours()) if told else (rank(), world())


def visible_gpus() -> str | None:
    """The GPUs that this process may use, as the variable of CUDA names them; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def meeting_point() -> tuple[str, int]:
    """Host and port of the store through which the processes of a job find each other."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def restarts() -> int:
    """How often torch's elastic agent has started the processes of this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher() -> int | None:
    """Process number of the `finetune launch` that waits for this process, where there is one."""
    number = os.environ.get("FINETUNE_LAUNCHER")
    return int(number) if number else None


def launcher_arguments() -> list[str]:
    """The words of the `accelerate launch` that started this process, flags with underscores."""
    import psutil  # its start takes a while, and most commands do without

    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
        except psutil.Error:
            return []
        if (given := launch_words(words)) is not None:
            return given
    return []


def launch_words(command: list[str]) -> list[str] | None:
    """What a command gives to `accelerate launch`, one word a part; None for another command.

    That has three spellings: `accelerate launch`, `accelerate-launch` and
    `python -m accelerate.commands.launch`, beside this package's own; each takes its flags with
    dashes or underscores.
    """
    for place, word in enumerate(command[:4]):
        name, before = Path(word).name, Path(command[place - 1]).name if place else ""
        if (
            name in ("accelerate-launch", "accelerate.commands.launch", "finetune.process.loopback")
            or (name == "launch" and "accelerate" in before)
            or word.endswith("accelerate/commands/launch.py")
        ):
            parts = [part for given in command[place + 1 :] for part in given.split("=", 1)]
            return [f"--{p[2:].replace('-', '_')}" if p.startswith("--") else p for p in parts]
    return None
