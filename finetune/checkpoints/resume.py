"""Decide whether a run directory is resumed, and from which checkpoint."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

from finetune import catalog
from finetune.data.stream.positions import Versions
from finetune.data.stream.windows import Counts
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.recipe import Recipe
from finetune.runs.manifest import newest_intact, read_manifest, set_aside
from finetune.runs.run import Run

Resume = bool | Literal["auto"]
"""Resume a run: `False`, `True` (there must be one), or `auto` (if there is one)."""


def claim(run: Run, plan: Plan, resume: Resume) -> int | None:
    """Step of the checkpoint to resume from, verified; None for a new start.

    Newer checkpoints that are damaged are renamed, with a warning on stderr.

    Raises:
        FinetuneError: the directory holds a run of another recipe or precision, or a run although
            `resume` is False, or none although it is True, or no intact checkpoint.
    """
    if not run.recipe.exists():
        if resume is True:
            raise FinetuneError(
                f"{run.root}: no run to resume; omit --resume to start one, or use --resume auto, "
                "which starts a run if there is none"
            )
        return None
    changed = catalog.differences(catalog.load(run.recipe), plan.recipe)
    if changed:
        raise FinetuneError(
            f"{run.root}: contains a run of another recipe; choose another --output. "
            f"They differ in {'; '.join(changed)}. Fields that may change: "
            f"{', '.join(_free_to_change(plan.recipe))}"
            f"{_further(run)}"
        )
    newest = run.newest()
    if newest is not None and resume is not False:
        _refuse_other_precision(run, plan.backend.precision)
    if resume is False:
        if newest is not None:
            raise FinetuneError(
                f"{run.root}: contains this recipe's run up to step {newest}; continue it with "
                "--resume, or choose another --output"
            )
        return None
    if newest is None:
        if resume is True:
            raise FinetuneError(
                f"{run.root}: its run has no complete checkpoint to resume from; omit --resume "
                "to start it again, or use --resume auto, which does the same"
            )
        return None
    return _intact(run, plan.recipe)


def refuse_other_data(run: Run, step: int, now: dict[str, Any]) -> None:
    """Refuse to resume from a checkpoint with different rows than it was trained on.

    Older checkpoints do not record their rows and are not checked.

    Raises:
        FinetuneError: with the rows then and now, for each split that differs.
    """
    then: dict[str, Any] = read_manifest(run.checkpoint(step))["progress"].get("data") or now
    if then != now:
        raise FinetuneError(
            f"{run.root}: the data is not that of the run: {_changed_rows(then, now)}; restore the "
            f"old data, or choose another --output{_further(run)}"
        )


def standing(
    run: Run, step: int | None, versions: Versions
) -> tuple[dict[str, Any] | None, Counts | None]:
    """The state of a stream at a checkpoint and the counts until then; as at the start without one.

    Raises:
        FinetuneError: with the file of the stream that has changed.
    """
    if step is None:
        return None, None
    state = read_manifest(run.checkpoint(step))["progress"]["stream"]
    try:
        counts = json.loads(run.data.read_text(encoding="utf-8"))["train"]
        then = [each["revision"] for each in counts["by_source"]]
    except (OSError, ValueError, LookupError, TypeError):  # damaged: counted again from here
        return state, None
    if then != versions:
        files = ({n: v for each in of for n, v in each.items()} for of in (then, versions))
        before, now = files
        other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        raise FinetuneError(
            f"{run.root}: the stream is not that of the run: {len(other)} of its files have "
            f"changed, the first is {', '.join(other[:1])}; restore them, or choose another "
            f"--output{_further(run)}"
        )
    return state, counts


def _further(run: Run) -> str:
    """Advice for a user who wants to train a run's adapter on other data; empty without one."""
    if catalog.load(run.recipe).adapter is None:
        return ""
    return (
        f". To train its adapter further on other data, set model.adapter={run.root} and choose "
        "another --output"
    )


def _free_to_change(recipe: Recipe) -> list[str]:
    """Names of the fields that may change on resume, without those of other methods."""
    own = {"backend", *(each.name for each in dataclasses.fields(recipe))}
    return [each for each in sorted(catalog.FREE_TO_CHANGE) if each.split(".")[0] in own]


def _changed_rows(then: dict[str, Any], now: dict[str, Any]) -> str:
    changes: list[str] = []
    for split, purpose in (("train", "train"), ("eval", "evaluate")):
        if then[split] != now[split]:
            was, has = (f"{each[split]['documents']:,} rows of {each[split]['tokens']:,} tokens"
                        for each in (then, now))  # fmt: skip
            change = f"{was} then, {has} now" if was != has else f"{was}, but different ones"
            changes.append(f"to {purpose} on {change}")
    return "; ".join(changes)


def _refuse_other_precision(run: Run, precision: str) -> None:
    known = _recorded_precision(run)
    if known not in (None, precision):
        raise FinetuneError(
            f"{run.root}: trained in {known}; {precision} would change its results; continue it "
            f"with --precision {known}, or choose another --output"
        )


def _recorded_precision(run: Run) -> Any:
    """The precision in the run's plan; None if it is not recorded or not readable."""
    try:
        return json.loads(run.plan.read_text(encoding="utf-8")).get("precision")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _intact(run: Run, recipe: Recipe) -> int:
    step, damaged = newest_intact(run, lambda manifest: _recipe_mismatch(manifest, recipe))
    lines = [
        f"{run.checkpoint(number)}: damaged: {'; '.join(found[:3])}"
        for number, found in damaged.items()
    ]
    if step is None:
        raise FinetuneError(
            *lines,
            f"{run.root}: no checkpoint is intact; restore one from a copy, or remove "
            f"{run.checkpoints} and start again without --resume",
        )
    for number, line in zip(damaged, lines, strict=True):
        aside = set_aside(run, number)
        print(f"warning: {line}; renamed to {aside.name}, resuming from step {step}",
              file=sys.stderr)  # fmt: skip
    return step


def _recipe_mismatch(manifest: dict[str, Any], recipe: Recipe) -> list[str]:
    """Why a checkpoint is not of a recipe's run; empty for manifests without a recipe."""
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
    """Whether a run is complete: its last step is saved and its result exists."""
    newest = run.newest()
    if newest is None or not run.final.exists() or not run.recipe.is_file():
        return False
    if catalog.differences(catalog.load(run.recipe), plan.recipe):
        return False  # `claim` reports the differences
    if _recorded_precision(run) not in (None, plan.backend.precision):
        return False
    ends = [record.get("reason") for record in run.read_metrics("end")]
    if not ends or ends[-1] not in ("finished", "early stop"):
        return False
    try:
        progress = read_manifest(run.checkpoint(newest))["progress"]
    except FinetuneError:  # `claim` renames it and resumes from an older one, or reports it
        return False
    patience = plan.recipe.evaluation.patience
    if patience is not None and progress.get("stale", 0) >= patience:
        return True
    try:
        rows = json.loads(run.data.read_text(encoding="utf-8"))["train"]["rows"]
        return newest >= plan.steps(rows)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return False  # a damaged record: resuming writes it again


def card(run: Run) -> Path:
    """The model card of a run's result, the last file that a training writes."""
    return run.final / "README.md"
