"""Read from the variables of SLURM, Kubeflow or SkyPilot which of a job's machines this is."""

import os
import re
from collections.abc import Sequence

from finetune.errors import FinetuneError

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below the ephemeral ones of Linux, one for each job and step."""
COUNTS = {"SLURM_STEP_NODELIST": "SLURM_STEP_NUM_NODES", "PET_MASTER_ADDR": "PET_NNODES",
          "SKYPILOT_NODE_IPS": "SKYPILOT_NUM_NODES"}  # fmt: skip
"""Variable with the address of machine 0 -> variable with the number of machines."""


def flags(given: Sequence[str]) -> list[str]:
    """Flags of `accelerate launch` on one of several machines that a scheduler started.

    A job that names its machines itself, or that has only one, gets none.

    Raises:
        FinetuneError: `srun` started several tasks on a node; one starts the processes of all its
            devices.
    """
    several = [name for name, count in COUNTS.items()
               if name in os.environ and os.environ.get(count, "1") != "1"]  # fmt: skip
    if not several or any(flag.replace("-", "_").startswith("__num_machines") for flag in given):
        return []
    head, count = os.environ[several[0]], os.environ[COUNTS[several[0]]]
    if several[0].startswith("SLURM"):
        if os.environ.get("SLURM_STEP_NUM_TASKS", count) != count:
            raise FinetuneError(
                f"srun: {os.environ['SLURM_STEP_NUM_TASKS']} tasks on {count} nodes; finetune "
                "launch starts the processes of a node itself: srun --ntasks-per-node 1"
            )
        start = sum(int(os.environ.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
        place = [os.environ["SLURM_NODEID"], first_host(head), str(FIRST_PORT + start % PORTS)]
    elif several[0].startswith("PET"):
        place = [os.environ["PET_NODE_RANK"], head, os.environ.get("PET_MASTER_PORT", "29500")]
    else:
        place = [os.environ["SKYPILOT_NODE_RANK"], head.splitlines()[0], str(FIRST_PORT)]
    names = ("--machine_rank", "--main_process_ip", "--main_process_port")
    words = ["--num_machines", count]
    for name, value in zip(names, place, strict=True):
        words += [name, value]
    return words


def first_host(hosts: str) -> str:
    """The first of a list in SLURM's form: `a1` of `a[1-3,7],b`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).partition(",")[0]
