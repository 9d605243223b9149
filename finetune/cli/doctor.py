"""`finetune doctor`: check a model or a recipe in seconds, before renting a GPU."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import options

if TYPE_CHECKING:
    from finetune.verification.model_checks.finding import Finding

SUMMARY = "check a model or a recipe in seconds, before renting a GPU"
NAME_WIDTH = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", nargs="?", help="model folder or hub id, or a recipe")
    options.override_words(parser, "adapter.r=8")
    options.add(parser, "--json  print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Describe this machine, or check a model or a recipe.

    Returns the exit status, which is 1 if a check failed.
    """
    from finetune.cache import cache
    from finetune.verification.model_checks.examination import Examination
    from finetune.verification.model_checks.system import describe_system
    from finetune.verification.model_checks.target import named

    if arguments.subject is None:
        print(describe_system())
        return 0
    options.without_bars()
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        subject = named(arguments.subject, list(arguments.overrides))
        examination = Examination(subject, Path(folder), cache("data"))
        found = list["Finding"]()
        for finding in examination.findings():
            found.append(finding)
            if not arguments.json:
                print(f"{finding.answer:<4} {finding.name:<{NAME_WIDTH}} {finding.why}", flush=True)
        if arguments.json:
            record = {
                "subject": examination.about,
                "notes": examination.notes,
                "findings": [dataclasses.asdict(each) for each in found],
            }
            print(json.dumps(record, indent=2))
        else:
            for note in examination.notes:
                print(f"note {note}")
    return int(any(each.passed is False for each in found))
