"""Read from SLURM's variables which of a job's machines this is."""

import os
import re
from collections.abc import Sequence

from finetune.errors import FinetuneError

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below the ephemeral ones of Linux, one for each job and step."""


def flags(given: Sequence[str]) -> list[str]:
    """Flags of `accelerate launch` for a task that `srun` started on each of several nodes.

    A job that names its machines itself, or that is not started by `srun` on several, gets none.

    Raises:
        FinetuneError: a node has several tasks; one starts the processes of all its devices.
    """
    variables = os.environ
    nodes = variables.get("SLURM_STEP_NUM_NODES", "1")
    named = any(flag.replace("-", "_").startswith("__num_machines") for flag in given)
    if nodes == "1" or named or "SLURM_STEP_NODELIST" not in variables:
        return []
    if variables.get("SLURM_STEP_NUM_TASKS", nodes) != nodes:
        raise FinetuneError(
            f"srun: {variables['SLURM_STEP_NUM_TASKS']} tasks on {nodes} nodes; finetune launch "
            "starts the processes of a node itself: srun --ntasks-per-node 1"
        )
    job, step = (int(variables.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
    return [
        "--num_machines", nodes,
        "--machine_rank", variables["SLURM_NODEID"],
        "--main_process_ip", first_host(variables["SLURM_STEP_NODELIST"]),
        "--main_process_port", str(FIRST_PORT + (job + step) % PORTS),
    ]  # fmt: skip


def first_host(hosts: str) -> str:
    """The first of a list in SLURM's form: `a1` of `a[1-3,7],b`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).partition(",")[0]
