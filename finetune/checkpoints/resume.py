"""Whether and from where a run directory is continued."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.recipe import Recipe
from finetune.runs.manifest import newest_intact, read_manifest, set_aside
from finetune.runs.run import Run

Resume = bool | Literal["auto"]
"""Whether a run goes on: no, yes (there must be one), or where there is one."""


def claim(run: Run, plan: Plan, resume: Resume) -> int | None:
    """The checkpoint to continue from, verified; None for a new start.

    Damaged checkpoints that are newer are renamed, with a line on stderr.

    Raises:
        FinetuneError: the directory holds another recipe's run, one of another precision, one that
            was not asked to be continued, none where one was to be continued, or no intact
            checkpoint of it.
    """
    if not run.recipe.exists():
        if resume is True:
            raise FinetuneError(
                f"{run.root}: no run to resume; leave --resume out to start one, or write "
                "--resume auto, which starts where there is nothing and else continues"
            )
        return None
    changed = catalog.differences(catalog.load(run.recipe), plan.recipe)
    if changed:
        raise FinetuneError(
            f"{run.root}: holds the run of another recipe; choose another --output. "
            f"They differ in {'; '.join(changed)}. Free to change are "
            f"{', '.join(sorted(catalog.FREE_TO_CHANGE))}"
            f"{_further(run)}"
        )
    newest = run.newest()
    if newest is not None and resume is not False:
        _refuse_other_precision(run, plan.backend.precision)
    if resume is False:
        if newest is not None:
            raise FinetuneError(
                f"{run.root}: holds this recipe's run up to step {newest}; continue it with "
                "--resume, or choose another --output"
            )
        return None
    if newest is None:
        if resume is True:
            raise FinetuneError(
                f"{run.root}: its run has no complete checkpoint to resume from; leave --resume "
                "out to start it anew, or write --resume auto, which does so by itself"
            )
        return None
    return _intact(run, plan.recipe)


def refuse_other_data(run: Run, step: int, now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint with other rows than its steps were counted in.

    One that was written before they were kept in it says nothing of them.

    Raises:
        FinetuneError: with what the rows were and are, for each split that differs.
    """
    then: dict[str, Any] = read_manifest(run.checkpoint(step))["progress"].get("data") or now
    if then != now:
        raise FinetuneError(
            f"{run.root}: the data is not that of the run: {_changed_rows(then, now)}; put the old "
            f"data back, or choose another --output{_further(run)}"
        )


def _further(run: Run) -> str:
    """The way to train a run's adapter on other data, where that may be what is wanted."""
    if catalog.load(run.recipe).adapter is None:
        return ""
    return (
        f". To train its adapter further on other data, set model.adapter={run.root} and choose "
        "another --output"
    )


def _changed_rows(then: dict[str, Any], now: dict[str, Any]) -> str:
    told: list[str] = []
    for split, purpose in (("train", "train"), ("eval", "evaluate")):
        if then[split] != now[split]:
            was, has = (f"{each[split]['documents']:,} rows of {each[split]['tokens']:,} tokens"
                        for each in (then, now))  # fmt: skip
            change = f"{was} then, {has} now" if was != has else f"{was}, but others than then"
            told.append(f"to {purpose} on {change}")
    return "; ".join(told)


def _refuse_other_precision(run: Run, precision: str) -> None:
    known = _recorded(run.plan, "precision")
    if known not in (None, precision):
        raise FinetuneError(
            f"{run.root}: trained in {known}, which changes the mathematics, and is to go on in "
            f"{precision}; continue it with --precision {known}, or choose another --output"
        )


def _recorded(path: Path, key: str) -> Any:
    """A value of a record of the run; None where nothing is known of it."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _intact(run: Run, recipe: Recipe) -> int:
    step, damaged = newest_intact(run, lambda manifest: _of_another_recipe(manifest, recipe))
    told = [
        f"{run.checkpoint(number)}: damaged: {'; '.join(found[:3])}"
        for number, found in damaged.items()
    ]
    if step is None:
        raise FinetuneError(
            *told,
            f"{run.root}: no checkpoint is intact; restore one from a copy, or remove "
            f"{run.checkpoints} and start anew without --resume",
        )
    for number, line in zip(damaged, told, strict=True):
        aside = set_aside(run, number)
        print(f"warning: {line}; renamed to {aside.name}, going on from step {step}",
              file=sys.stderr)  # fmt: skip
    return step


def _of_another_recipe(manifest: dict[str, Any], recipe: Recipe) -> list[str]:
    """Why a checkpoint is not of a recipe's run; nothing is known of one that keeps no recipe."""
    if "recipe" not in manifest:
        return []
    try:
        changed = catalog.differences(catalog.from_fields(manifest["recipe"]), recipe)
    except FinetuneError as error:
        return [f"its recipe cannot be read: {error}"]
    if not changed:
        return []
    return [f"it belongs to the run of another recipe; they differ in {'; '.join(changed)}"]


def finished(run: Run, plan: Plan) -> bool:
    """Whether a run has nothing left to do: its last step is saved and its result is there."""
    newest = run.newest()
    if newest is None or not run.final.exists() or not run.recipe.is_file():
        return False
    if catalog.differences(catalog.load(run.recipe), plan.recipe):
        return False  # `claim` says what differs
    if _recorded(run.plan, "precision") not in (None, plan.backend.precision):
        return False
    ends = [record.get("reason") for record in run.read_metrics("end")]
    if not ends or ends[-1] not in ("finished", "early stop"):
        return False
    try:
        progress = read_manifest(run.checkpoint(newest))["progress"]
    except FinetuneError:  # `claim` sets it aside and continues before it, or says what it is
        return False
    patience = plan.recipe.evaluation.patience
    if patience is not None and progress.get("stale", 0) >= patience:
        return True
    try:
        rows = json.loads(run.data.read_text(encoding="utf-8"))["train"]["rows"]
        return newest >= plan.steps(rows)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return False  # a damaged record: `claim` continues, which writes it anew


def card(run: Run) -> Path:
    """The card of a run's result, the last file that a training writes."""
    return run.final / "README.md"
