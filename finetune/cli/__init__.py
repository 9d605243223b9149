"""The command line, with one file per command."""

import sys
from typing import NoReturn

from finetune.process.signals import requeue_on_sigterm


def run() -> NoReturn:
    """Run the command of this process; a training can be requeued from its first moment."""
    if sys.argv[1:2] in (["launch"], ["train"]):
        requeue_on_sigterm()
    from finetune.cli import main

    main.run()


__all__ = ["run"]
