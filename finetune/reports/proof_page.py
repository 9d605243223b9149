"""Show a proof (`proof.json`, see `finetune prove`) as tables, as a page, and in a run's report."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.errors import FinetuneError, reading
from finetune.reports.tables import Cell, Table, rendered, tables
from finetune.runs import units
from finetune.runs.run import Run, of_record, write_whole

FORMAT = 1

QUESTIONS = {
    "realised": "each process holds what the backend promises",
    "equal": "losses, gradient norms and trained weights equal those of one process, step by step",
    "packing": "packed rows train like separate rows",
    "resume": "a run killed with SIGKILL continues, here and elsewhere, on the same trajectory",
    "end to end": "the result loads in plain transformers and PEFT and answers as trained",
}
"""Names of the checks, and what each of them shows."""

KINDS = {"own": "the recipe", "lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}
WORDS = {True: "yes", False: "NO", None: "-"}


def read_proof(path: Path) -> dict[str, Any]:
    """The record of a proof.

    Raises:
        FinetuneError: the file cannot be read or has another format.
    """
    with reading(f"{path}: cannot be read as a proof"):
        record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FinetuneError(f"{path}: not a proof of format {FORMAT}; run finetune prove again")
    return record


def take_proof(run: Run, folder: Path) -> None:
    """Copy the proof in `folder` to a run with the same recipe.

    Raises:
        FinetuneError: the proof is of another recipe; the message has the fields that differ.
    """
    source = folder / "proof.json"
    record = read_proof(source)
    proved = catalog.from_fields(record.get("recipe"), f"{source}: recipe")
    with of_record(source):
        proof_tables(record)
    changed = catalog.differences(proved, catalog.load(run.recipe))
    if changed:
        raise FinetuneError(
            f"{folder}: a proof of another recipe than that of {run.root}: {'; '.join(changed)}"
        )
    shutil.copy2(folder / "proof.json", run.proof)


def overview(record: Mapping[str, Any]) -> Table:
    """Table with a row for each pair of kind and backend and a column for each check."""
    answers: dict[tuple[str, str], dict[str, list[bool | None]]] = {}
    for check in record["checks"]:
        pair = answers.setdefault((check["kind"], check["backend"]), {})
        pair.setdefault(check["name"], []).append(check["passed"])
    rows = [
        (KINDS[kind], backend, *(_answer(pair.get(name, [])) for name in QUESTIONS))
        for (kind, backend), pair in answers.items()
    ]
    return Table(rows, ("trained", "backend", *QUESTIONS))


def _answer(passed: list[bool | None]) -> str:
    """All outcomes of one check of a pair, as one word."""
    known = [each for each in passed if each is not None]
    return WORDS[all(known) if known else None]


def proof_tables(record: Mapping[str, Any]) -> list[Table]:
    """Tables of a proof for a run's page; empty without a proof."""
    if not record:
        return []
    if record.get("format") != FORMAT:
        return list(tables(record))
    return [_facts(record), overview(record), *_failures(record), *_refused(record)]


def _facts(record: Mapping[str, Any]) -> Table:
    tolerance = ", ".join(f"{name} {value:g}" for name, value in record["tolerance"].items())
    facts: list[tuple[Cell, ...]] = [
        ("verdict", record["verdict"]),
        ("steps", record["settings"]["steps"]),
        ("processes", record["settings"]["processes"]),
        ("precision", record["settings"]["precision"]),
        ("tolerances, relative", tolerance),
        ("made", record["environment"]["started"]),
        ("commit", record["environment"]["commit"]),
        ("took", f"{units.duration(record['seconds'])}, {record['launches']} launches"),
    ]
    return Table(facts)


def _failures(record: Mapping[str, Any]) -> list[Table]:
    rows = [
        (KINDS[check["kind"]], check["backend"], check["name"], check["summary"])
        for check in record["checks"]
        if check["passed"] is False
    ]
    return [Table(rows, ("trained", "backend", "check", "what is wrong"), "failed")] if rows else []


def _refused(record: Mapping[str, Any]) -> list[Table]:
    rows = [(KINDS[r["kind"]], r["backend"], r["reason"]) for r in record["refused"]]
    return [Table(rows, ("trained", "backend", "why"), "not tried")] if rows else []


def write_page(source: Path, target: Path) -> None:
    """Write a proof as a self-contained HTML page."""
    record = read_proof(source)
    with of_record(source):
        text = _page(record)
    write_whole(target, text)


def _page(record: Mapping[str, Any]) -> str:
    recipe = record["recipe"]
    name = recipe["model"].get("name") or (recipe["model"].get("config") or {}).get("model_type")
    return rendered(
        "proof.html.jinja",
        title=f"{recipe['method']} of {name}",
        record=record,
        facts=_facts(record),
        overview=overview(record),
        failures=_failures(record),
        refused=_refused(record),
        questions=QUESTIONS,
        kinds=KINDS,
        words=WORDS,
        grids=[_grid(check) for check in record["checks"]],
    )


def _grid(check: Mapping[str, Any]) -> Table | None:
    grid = check["grid"]
    if grid is None:
        return None
    rows = [[f"{v:.9g}" if isinstance(v, float) else v for v in row] for row in grid["rows"]]
    return Table(rows, grid["columns"])
