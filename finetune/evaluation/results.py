"""Write an evaluation to `results.json`, `samples.jsonl` and an HTML page."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from finetune.data.scratch import scratch_for
from finetune.errors import FinetuneError
from finetune.evaluation.contamination import digest, named
from finetune.evaluation.evaluation import Evaluation, Side, comparable
from finetune.evaluation.measures import Interval, Measure, difference
from finetune.reports.evaluation_page import page
from finetune.runs.environment import public, versions
from finetune.runs.run import write_json

RESULTS, SAMPLES, PAGE = "results.json", "samples.jsonl", "index.html"
SAME = 1e-9
"""Tolerance for equal scores."""


def folder_of(evaluation: Evaluation, name: str | None) -> Path:
    """Output folder in the run, or in the working directory, but never in a model folder."""
    request = evaluation.request
    run = evaluation.after.subject.run
    if name is None:
        of_rows = "held-out" if evaluation.asked or evaluation.total else "tasks"
        name = Path(request.data.source).stem if request.data is not None else of_rows
        name = name if run is not None else f"{request.subject}-{name}"
    root = run.evaluations if run is not None else Path("eval")
    return root / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "eval")


def refuse_foreign(folder: Path) -> None:
    """Reject a target that is neither an empty folder nor an earlier evaluation.

    Raises:
        FinetuneError: the target contains something else.
    """
    there = list(folder.iterdir()) if folder.is_dir() else []
    if (folder.exists() and not folder.is_dir()) or (there and not (folder / RESULTS).is_file()):
        raise FinetuneError(
            f"{folder}: exists and was not written by an evaluation; name another --output"
        )


def write(evaluation: Evaluation, folder: Path) -> dict[str, Any]:
    """Write an evaluation atomically; returns the contents of `results.json`.

    Raises:
        FinetuneError: the folder contains something else, or cannot be written.
    """
    refuse_foreign(folder)
    found, samples = results(evaluation), rows_of(evaluation)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_for(folder) as scratch:
        write_json(scratch / RESULTS, found)
        lines = (json.dumps(each, ensure_ascii=False) for each in samples)
        text = "".join(f"{line}\n" for line in lines)
        (scratch / SAMPLES).write_text(text, encoding="utf-8", errors="replace")
        (scratch / PAGE).write_text(page(found, samples), encoding="utf-8", errors="replace")
        if folder.is_dir():
            shutil.rmtree(folder)
        scratch.rename(folder)
    return found


def results(evaluation: Evaluation) -> dict[str, Any]:
    """Contents of `results.json`."""
    request, after, before = evaluation.request, evaluation.after, evaluation.before
    names = [
        *evaluation.measures,
        *(n for n in evaluation.before_measures if n not in evaluation.measures),
    ]
    shared = evaluation.overlap
    return {
        "subject": _side(after),
        "against": None if before is None else _side(before),
        "rows": {
            "answered": len(evaluation.asked),
            "scored": 0 if after.losses is None else len(after.losses.nll),
            "of": evaluation.total,
            "sources": sorted({named(each.source) for each in evaluation.asked}),
            "digest": digest([[each.prompt, each.expected] for each in evaluation.asked]),
            "also_trained": None if shared is None else vars(shared),
        },
        "measures": {
            name: _measured(evaluation.measures.get(name), evaluation.before_measures.get(name))
            for name in names
        },
        "primary": evaluation.primary,
        "gate": [
            {"bound": str(each.bound), "passed": each.passed, "said": each.said}
            for each in evaluation.verdicts
        ],
        "notes": evaluation.notes,
        "settings": {
            "max_new_tokens": request.asking.max_new_tokens,
            "temperature": request.asking.temperature,
            "batch_rows": request.asking.batch_rows,
            "limit": request.limit,
            "code_samples": request.code_samples,
        },
        "versions": versions(),
    }  # fmt: skip


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": public(side.subject.name),
        "kind": side.subject.kind,
        "step": side.subject.step,
        "cut": sum(each.cut for each in side.answers),
        "tokens_per_second": side.tokens_per_second,
    }


def _measured(after: Measure | None, before: Measure | None) -> dict[str, Any]:
    some = after or before
    assert some is not None
    found: dict[str, Any] = {"unit": some.unit, "better": some.better, "rows": some.rows}
    for name, each in (("after", after), ("before", before)):
        found[name] = None if each is None else each.total
        found[f"{name}_interval"] = None if each is None else _listed(each.interval())
        if each is not None and each.detail:
            found[f"{name}_detail"] = each.detail
    found["difference"] = found["difference_interval"] = None
    if after is not None and before is not None and comparable(after, before):
        change, interval = difference(after, before)
        found |= {"difference": change, "difference_interval": _listed(interval)}
    return found


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def rows_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """All answered rows with prompt, answers, scores and the change between both models."""
    rows = list[dict[str, Any]]()
    for number, asked in enumerate(evaluation.asked):
        row: dict[str, Any] = {
            "place": named(asked.place),
            "prompt": asked.prompt,
            **asked.pictures,
            "expected": asked.expected or json.dumps(asked.calls, ensure_ascii=False),
        }
        for name, side in (("after", evaluation.after), ("before", evaluation.before)):
            if side is not None:
                answer = side.answers[number]
                text = answer.text or json.dumps(answer.calls or "", ensure_ascii=False)
                row[name] = answer.text if answer.calls is None else text
                row[f"{name}_finish"] = "length" if answer.cut else "stop"
        scores = {
            name: _scores(name, evaluation, number)
            for name, each in evaluation.measures.items()
            if each.rows == len(evaluation.asked) and each.unit in ("share", "points")
        }
        row["scores"] = scores
        row["change"] = _change(scores.get(evaluation.primary or ""), evaluation.before is not None)
        rows.append(row)
    return rows


def _scores(name: str, evaluation: Evaluation, number: int) -> dict[str, float]:
    found = {"after": float(evaluation.measures[name].of_rows[number])}
    if name in evaluation.before_measures:
        found["before"] = float(evaluation.before_measures[name].of_rows[number])
    return found


def _change(scores: dict[str, float] | None, compared: bool) -> str:
    """The change of a row by the primary measure."""
    if scores is None:
        return ""
    after = scores["after"]
    if not compared:
        return "right" if after >= 1 - SAME else "wrong"
    change = after - scores["before"]
    if abs(change) > SAME:
        return "got better" if change > 0 else "got worse"
    return "both right" if after >= 1 - SAME else "both wrong"
