"""Launchers by name: each starts the processes of a job."""

LAUNCHERS: dict[str, str] = {"accelerate": "finetune.launchers.accelerate:run"}
"""`module:function` of each, imported when it is used."""
