"""Launchers, which start the processes of a job, by name."""

LAUNCHERS: dict[str, str] = {"accelerate": "finetune.launchers.accelerate:run"}
"""`module:function` of each launcher that waits for its processes, imported on use."""

QUEUES: dict[str, str] = {
    name: f"finetune.launchers.{name}:QUEUE"
    for name in ("slurm", "hosts", "skypilot", "kubernetes")
}
"""`module:attribute` of each launcher of a cluster, a `finetune.launchers.submission.Queue`."""
