"""Launchers, which start the processes of a job, by name."""

LAUNCHERS: dict[str, str] = {"accelerate": "finetune.launchers.accelerate:run"}
"""`module:function` of each launcher, imported on use."""
