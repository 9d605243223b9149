"""The command line: one file for each verb."""

from finetune.cli.main import run

__all__ = ["run"]
