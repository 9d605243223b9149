"""Refuse a directory that holds something other than a run, or another chain or sweep."""

from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.runs.run import read_object, write_json

NOT_A_RUN = {
    "run.lock", "offload", "flight_records", "starting_adapter.json", "job.json", "job",
    "attempts.jsonl",
}  # fmt: skip
"""Names allowed in a directory before it has a run's record, in addition to hidden files.

A start that failed while preparing data or loading the model leaves the first four, and a scheduler
the others.
"""


def refuse_foreign(root: Path) -> None:
    """Make a directory for a run; raises FinetuneError if it holds something else."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise unusable_directory(root, error) from None
    others = [name for name in found if name not in NOT_A_RUN and not name.startswith(".")]
    if others:
        raise FinetuneError(
            f"{root}: not empty and not a run (it contains {others[0]}"
            f"{f' and {len(others) - 1} more' if others[1:] else ''}); choose another --output"
        )


def unusable_directory(root: Path, error: OSError) -> FinetuneError:
    return FinetuneError(
        f"{root}: cannot be a run directory ({error.strerror}); choose another --output"
    )


def begin(root: Path, kind: str, record: dict[str, Any], resume: bool, option: str) -> None:
    """Write the record of a chain or a sweep, or continue it; another one is refused."""
    known = read_object(root / f"{kind}.json")
    if known and (known != record or not resume):
        raise FinetuneError(
            f"{root}: has {'this' if known == record else 'another'} {kind}; "
            f"{'continue it with --resume, or ' if known == record else ''}choose another {option}"
        )
    write_json(root / f"{kind}.json", record)
