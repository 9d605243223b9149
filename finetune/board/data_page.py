"""The page of data: rows as the model sees them, their lengths, and a row to edit."""

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.board import new_run
from finetune.board.shelf import Shelf
from finetune.board.tasks import Tasks, Words, command, first
from finetune.errors import FinetuneError

MOST_ROWS = 50
LONGEST_ROW = 256 * 1024
"""Bytes of a row that is edited."""
ONE = threading.Semaphore(1)
"""One command at a time: each imports transformers."""


def page(shelf: Shelf, tasks: Tasks, asked: Words) -> dict[str, Any]:
    """The values of the page, before the rows are read."""
    name = first(asked, "from")
    known = {"title": "Data", "files": new_run.files(tasks), "asked": None, "began": None}
    if not name:
        return known | {"made": new_run.recipes(tasks), "runs": list(shelf.watches())}
    began = new_run.origin(shelf, tasks, name)
    words = asked.get("set", [])
    count = rows_of(asked)
    inspect = ["inspect", began.word, *words, "--rows", str(count)]
    return known | {
        "began": began, "asked": asked, "count": count, "command": command(inspect),
        "query": {"from": name, "set": words, "rows": count},
    }  # fmt: skip


def rows_of(asked: Words) -> int:
    given = first(asked, "rows", "5")
    return min(MOST_ROWS, max(1, int(given))) if given.isdecimal() else 5


def rows(shelf: Shelf, tasks: Tasks, asked: Words) -> dict[str, Any]:
    """The rows, by `finetune inspect --json`.

    Raises:
        FinetuneError: with what the command said.
    """
    began = new_run.origin(shelf, tasks, first(asked, "from"))
    words = asked.get("set", [])
    recipe = catalog.override(began.recipe, words) if words else began.recipe
    found = _inspect(began.word, *words, "--rows", str(rows_of(asked)))
    return page(shelf, tasks, asked) | {
        "inspection": found, "raw": _raw(found), "limit": recipe.batch.max_length,
    }  # fmt: skip


def edited(shelf: Shelf, tasks: Tasks, sent: Words) -> dict[str, Any]:
    """One row as it was typed, as the model would see it.

    Raises:
        FinetuneError: the row is no JSON object, or the data's format does not read it.
    """
    began = new_run.origin(shelf, tasks, first(sent, "from"))
    row = first(sent, "row")
    if len(row) > LONGEST_ROW:
        raise FinetuneError(f"row: has more than {LONGEST_ROW:,} characters")
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"row: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FinetuneError(f"row: got a {type(value).__name__}, expected an object with columns")
    words = sent.get("set", [])
    recipe = catalog.override(began.recipe, words) if words else began.recipe
    if recipe.model.reads:
        source = Path(recipe.data[0].source)
        value = _with_files_in(value, source.parent if source.is_file() else source)
    with tempfile.TemporaryDirectory(dir=tasks.home) as folder:
        path = Path(folder) / "row.jsonl"
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")
        alone = {"source": str(path.resolve()), "first": None, "split": "train", "stream": False}
        data = [{**catalog.to_fields(recipe)["data"][0], **alone}]
        without = ["eval_data=[]", "eval_rows=null", "evaluation.metrics=[]", "data_checks=report"]
        found = _inspect(began.word, *words, f"data={json.dumps(data)}", *without, "--rows", "1")
    return {"inspection": found}


def _with_files_in(value: Any, folder: Path) -> Any:
    """The same value, whose strings that name a file of the data's folder name it from anywhere."""
    if isinstance(value, dict):
        return {name: _with_files_in(each, folder) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_files_in(each, folder) for each in value]
    if isinstance(value, str) and Path(value).suffix and os.path.isfile(file := folder / value):
        return str(file.resolve())
    return value


def _inspect(*words: str) -> dict[str, Any]:
    if not ONE.acquire(timeout=60):
        raise FinetuneError("other data is being read; try again")
    try:
        return json.loads(new_run.run_command("inspect", *words, "--json"))
    except ValueError:
        raise FinetuneError("finetune inspect: its answer cannot be read") from None
    finally:
        ONE.release()


def _raw(found: dict[str, Any]) -> str:
    """The row behind the first one shown, if it is a line of a JSONL file; otherwise a start."""
    place = str(found["rows"][0][0]["place"]) if found["rows"] else ""
    name, _, number = place.rpartition(" row ")
    path = Path(name)
    if number.isdecimal() and path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for at, line in enumerate(file, 1):
                if at == int(number):
                    return json.dumps(json.loads(line), indent=2, ensure_ascii=False)
    return "{}"
