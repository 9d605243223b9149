"""Refuse a directory that holds something other than a run."""

from pathlib import Path

from finetune.errors import FinetuneError

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
