"""`finetune watch`: follow a run until it ends."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.runs.run import Run

SUMMARY = "follow the log and the metrics of a run, until it ends"
SECONDS, SECONDS_BETWEEN_QUESTIONS = 0.5, 5.0
"""Seconds between looks at the files of a run, and between questions to a scheduler."""
STATUS = {"finished": 0, "stopped early": 0, "interrupted": 75}
"""Exit status by the state in which a run ended; 1 for others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")


def run(arguments: argparse.Namespace) -> int:
    from finetune.launchers.submission import PENDING, state_of
    from finetune.runs.standing import holder, run_at

    run, said = run_at(arguments.run), ""
    follow = _log(run) if run.job.exists() or run.log.exists() else _records(run)
    while True:
        held = holder(run) is not None
        state = "running" if held else state_of(run)[1]
        next(follow)
        if state != said:
            said = state
            print(f"{run.root}: {state}", file=sys.stderr, flush=True)
        if not held and not state.startswith(PENDING):
            return STATUS.get(state, 1)
        time.sleep(SECONDS if held else SECONDS_BETWEEN_QUESTIONS)


def _log(run: "Run") -> Iterator[None]:
    """Print what was added to the log of a job since the last turn; it may not exist yet."""
    read = 0
    while True:
        if run.log.exists():
            with run.log.open(errors="replace") as file:
                file.seek(read)
                print(file.read(), end="", flush=True)
                read = file.tell()
        yield


def _records(run: "Run") -> Iterator[None]:
    """Show the records that were added to the metrics since the last turn.

    A resumed run replaces the file by one without the records that it will write again.
    """
    from finetune.reports.display import Display
    from finetune.runs.metrics import parse
    from finetune.runs.progress import Appended
    from finetune.runs.run import objects

    display, appended, shown = Display(run), Appended(run.metrics), 0.0
    while True:
        for _, block in appended.blocks():
            for record in (parse(run, fields) for fields in objects(block.splitlines())):
                if record.time > shown:
                    shown = record.time
                    display.show(record)
        yield
