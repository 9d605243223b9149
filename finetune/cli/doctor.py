"""`finetune doctor`: print the table of questions and answers."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from finetune.cache import cache
from finetune.recipe import Recipe
from finetune.verification.doctor.examination import Examination
from finetune.verification.doctor.finding import Finding
from finetune.verification.doctor.subject import named
from finetune.verification.doctor.system import describe_system

NAME_WIDTH = 26


def run(word: str | None, overrides: Sequence[str], as_json: bool) -> int:
    """Describe this machine, or examine a model or a recipe; returns the exit status.

    That is 1 where an answer is no.
    """
    if word is None:
        print(describe_system())
        return 0
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        examination = Examination(named(word, list(overrides)), Path(folder), cache("data"))
        found = list[Finding]()
        for finding in examination.findings():
            found.append(finding)
            if not as_json:
                print(f"{finding.answer:<4} {finding.name:<{NAME_WIDTH}} {finding.why}", flush=True)
        if as_json:
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


def doctor(recipe: Recipe) -> list[Finding]:
    """What `finetune doctor` finds, in seconds and without a GPU, on two layers of the model.

    Raises:
        FinetuneError: the recipe's data cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        return list(Examination(recipe, Path(folder), cache("data")).findings())
