"""Submit a managed job to SkyPilot, which finds machines and starts it again after a preemption."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.errors import FinetuneError, Interrupted
from finetune.launchers.cluster import Cluster
from finetune.launchers.submission import JobState, Queue, Submission, Submitted, ask, recipe_text
from finetune.recipe.field_types import STRICT, Positive, Text
from finetune.runs.run import Run

ACCELERATORS = {
    "A100-40": "A100", "A100-80": "A100-80GB", "H100-80": "H100", "H200": "H200", "B200": "B200",
    "L4": "L4", "L40S": "L40S", "A10G": "A10G", "T4": "T4", "V100-16": "V100", "MI300X": "MI300X",
}  # fmt: skip
"""SkyPilot's name of a GPU (0.14), which does not check names itself before it looks for one."""
OVER = ("SUCCEEDED", "CANCELLED", "FAILED")
WAITING = ("PENDING", "SUBMITTED", "STARTING", "RECOVERING")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SkyPilot(Cluster):
    """Settings of a job of SkyPilot."""

    runs: Text
    """Folder on the machines in which the runs lie: one of `mounts`, which outlasts them."""
    mounts: dict[Text, Text] = Field(default_factory=dict[str, str])
    """Folders on the machines and their buckets, such as /runs: s3://my-bucket."""
    infra: Text | None = None
    """Cloud, region and zone, such as aws/us-east-1; by default the cheapest."""
    spot: bool = True
    accelerator: Text | None = None
    """SkyPilot's name of the GPU, if it is not known for `gpu`."""
    image: Text | None = None
    disk_size: Positive | None = None
    """GB of a machine's disk."""
    setup: Text | None = None
    """Shell commands that install the toolkit, once on each machine."""


def task(job: Submission[SkyPilot], secrets: Mapping[str, str]) -> str:
    """The task in YAML. Status 75 of the job means that it is started again.

    Raises:
        FinetuneError: SkyPilot's name of the GPU is not known.
    """
    cluster = job.cluster
    name = cluster.accelerator or ACCELERATORS.get(cluster.gpu or "")
    if cluster.gpus and name is None:
        raise FinetuneError(
            f"cluster.gpu {cluster.gpu}: not known to be one of SkyPilot; give "
            f"cluster.accelerator, or one of {', '.join(ACCELERATORS)}"
        )
    resources = {
        "infra": cluster.infra, "accelerators": f"{name}:{cluster.gpus}" if cluster.gpus else None,
        "cpus": f"{cluster.cores}+" if cluster.cores else None,
        "memory": f"{cluster.host_ram:g}+" if cluster.host_ram else None,
        "use_spot": cluster.spot, "image_id": cluster.image, "disk_size": cluster.disk_size,
        "job_recovery": {"recover_on_exit_codes": [Interrupted.exit_status]},
    }  # fmt: skip
    fields = {
        "name": job.name, "num_nodes": cluster.nodes,
        "resources": {key: value for key, value in resources.items() if value is not None},
        "file_mounts": {place: {"source": bucket, "mode": "MOUNT"}
                        for place, bucket in cluster.mounts.items()},
        "envs": {"FINETUNE_RECIPE": recipe_text(job)}, "secrets": dict(secrets),
        "setup": cluster.setup,
        "run": 'printf %s "$FINETUNE_RECIPE" >recipe.json\n'
               f"exec {job.command('recipe.json', contained=True)}\n",
    }  # fmt: skip
    return yaml.safe_dump({key: each for key, each in fields.items() if each}, sort_keys=False)


def describe(job: Submission[SkyPilot]) -> str:
    return task(job, dict.fromkeys(job.cluster.environment, "***"))


def submit(job: Submission[SkyPilot]) -> Submitted:
    """Submit a job; raises FinetuneError if SkyPilot refuses it, or has a job of this name."""
    if (found := status({"id": job.name})).state != "ended":
        raise FinetuneError(f"job name '{job.name}': taken ({found.words}); give another: --name")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.touch(0o600)
        path.write_text(task(job, job.cluster.environment))
        ask("sky", "jobs", "launch", "--yes", "--detach-run", str(path))
    return Submitted(job.name)


def status(record: dict[str, Any]) -> JobState:
    listed = json.loads(ask("sky", "jobs", "queue", "--output", "json") or "[]")
    mine = [str(each["status"]) for each in listed if each["job_name"] == record["id"]]
    word = mine[0].rpartition(".")[2] if mine else ""
    if not word or word.startswith(OVER):
        return JobState("ended", word)
    return JobState("queued" if word in WAITING else "running", word)


def cancel(record: dict[str, Any], run: Run) -> str:
    ask("sky", "jobs", "cancel", "--yes", "--name", record["id"])
    return f"job {record['id']} of SkyPilot is cancelled; its run goes on from its last checkpoint"


QUEUE = Queue(SkyPilot, describe, submit, status, cancel, shares_disk=False)
