"""Submit a job to Kubernetes, as a TrainJob of Kubeflow with a runtime of its own."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic.dataclasses import dataclass

from finetune.errors import FinetuneError, Interrupted
from finetune.launchers.cluster import Cluster
from finetune.launchers.submission import JobState, Queue, Submission, Submitted, ask, recipe_text
from finetune.recipe.field_types import STRICT, Positive, Text
from finetune.runs.run import Run

API = "trainer.kubeflow.org/v1alpha1"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
THERE = "/tmp/recipe.json"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Kubernetes(Cluster):
    """Settings of a job of Kubernetes."""

    image: Text
    """Image in which `finetune` is installed."""
    claim: Text
    """Persistent volume claim with the runs, which all pods of a job mount."""
    runs: Text = "/runs"
    """Folder in the pods where it is mounted."""
    namespace: Text = "default"
    context: Text | None = None
    """Context of kubectl; by default the current one."""
    gpu_resource: Text = "nvidia.com/gpu"
    secret: Text | None = None
    """Secret whose keys are environment variables of the job."""
    grace_seconds: Positive = 600
    """Seconds that a pod may take to save after SIGTERM."""


def objects(job: Submission[Kubernetes], variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """The runtime and the TrainJob.

    A pod that ends with the status of an interruption is replaced, and so is one that the cluster
    takes away; a mistake ends the job. `exec` lets the signal of the end reach the toolkit.
    """
    cluster = job.cluster
    ends = {
        "Ignore": {"onExitCodes": {"operator": "In", "values": [Interrupted.exit_status]}},
        "FailJob": {"onExitCodes": {"operator": "In", "values": [FinetuneError.exit_status]}},
    }
    rules = [{"action": action, **rule} for action, rule in ends.items()]
    rules += [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget",
                                                        "status": "True"}]}]  # fmt: skip
    amounts = {
        "cpu": cluster.cores and str(cluster.cores),
        "memory": cluster.host_ram and f"{cluster.host_ram:g}G",
        cluster.gpu_resource: cluster.gpus and str(cluster.gpus),
    }
    command = f'printf %s "$FINETUNE_RECIPE" >{THERE} && exec {job.command(THERE, contained=True)}'
    # Kubernetes replaces $(NAME) in the value of a variable.
    given = {"FINETUNE_RECIPE": recipe_text(job).replace("$(", "$$("), **variables}
    container = {
        "name": "node", "image": cluster.image, "command": ["sh", "-c", command],
        "env": [{"name": name, "value": value} for name, value in given.items()],
        "resources": {"limits": {name: amount for name, amount in amounts.items() if amount}},
        "volumeMounts": [{"name": "runs", "mountPath": cluster.runs},
                         {"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    if cluster.secret:
        container["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": cluster.grace_seconds,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }  # fmt: skip
    jobs = {"backoffLimit": cluster.attempts, "podFailurePolicy": {"rules": rules},
            "template": {"spec": pod}}  # fmt: skip
    node = {"name": "node", "template": {"metadata": {"labels": {STEP: "trainer"}}, "spec": jobs}}
    about = {"apiVersion": API, "metadata": {"name": job.name, "namespace": cluster.namespace}}
    policy = {"numNodes": cluster.nodes, "torch": {}}
    return [
        {**about, "kind": "TrainingRuntime",
         "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": [node]}}}},
        {**about, "kind": "TrainJob",
         "spec": {"runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime",
                                 "name": job.name},
                  "trainer": {"numNodes": cluster.nodes}}},
    ]  # fmt: skip


def describe(job: Submission[Kubernetes]) -> str:
    hidden = dict.fromkeys(job.cluster.environment, "***")
    return yaml.safe_dump_all(objects(job, hidden), sort_keys=False)


def _kubectl(place: str, *words: str, given: str = "") -> str:
    """Run kubectl for CONTEXT/NAMESPACE."""
    context, namespace = place.split("/")
    chosen = [f"--context={context}"] if context else []
    return ask("kubectl", *chosen, f"--namespace={namespace}", *words, given=given)


def submit(job: Submission[Kubernetes]) -> Submitted:
    """Submit a job, after the cluster has checked both objects, whose name may be taken."""
    if not NAME.fullmatch(job.name):
        raise FinetuneError(
            f"job name '{job.name}': expected small letters, digits and dashes; give another with "
            "--name"
        )
    text = yaml.safe_dump_all(objects(job, job.cluster.environment))
    place = f"{job.cluster.context or ''}/{job.cluster.namespace}"
    _kubectl(place, "create", "--dry-run=server", "--filename=-", given=text)
    _kubectl(place, "create", "--filename=-", given=text)
    return Submitted(f"{place}/{job.name}")


def status(record: dict[str, Any]) -> JobState:
    place, _, name = record["id"].rpartition("/")
    words = ["get", "--ignore-not-found", "--output=json", "trainjob", name]
    told = json.loads(_kubectl(place, *words) or "{}")
    state = told.get("status", {})
    kinds = [each["type"] for each in state.get("conditions", ()) if each["status"] == "True"]
    if not told or {"Complete", "Failed"} & set(kinds):
        return JobState("ended", ", ".join(kinds))
    active = sum(each.get("active", 0) for each in state.get("jobsStatus", ()))
    return JobState("running", "active") if active else JobState("queued", ", ".join(kinds))


def cancel(record: dict[str, Any], run: Run) -> str:
    """Delete a job; its pods get SIGTERM, and save within their grace period."""
    place, _, name = record["id"].rpartition("/")
    _kubectl(place, "delete", "--wait=false", f"trainjob/{name}", f"trainingruntime/{name}")
    return f"job {record['id']} of Kubernetes is deleted; its pods save and end"


QUEUE = Queue(Kubernetes, describe, submit, status, cancel, shares_disk=False)
