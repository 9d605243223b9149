"""The command line, with one file per command."""

from finetune.cli.main import run

__all__ = ["run"]
