"""SQL queries that give the same result as the reference on a SQLite file."""

import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.evaluation.measures import Measure, of_scores
from finetune.evaluation.metrics.metric import Metric, Row, Settings
from finetune.evaluation.metrics.structured import FENCED
from finetune.evaluation.metrics.words import first
from finetune.evaluation.questions import Asked

SECONDS = 5.0
MOST_ROWS = 100_000
COLUMNS = ("database", "db_path")
"""Columns with the path of a row's SQLite file."""


def database_of(asked: Asked, settings: Settings) -> Path | None:
    """The SQLite file of a row."""
    named = next((asked.row[name] for name in COLUMNS if asked.row.get(name)), None)
    return Path(str(named)) if named is not None else settings.database


def result(database: Path, query: str) -> list[tuple[Any, ...]] | str:
    """Result rows of a query, or its error message; the file is opened read-only."""
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    timer = threading.Timer(SECONDS, connection.interrupt)
    try:
        connection.set_authorizer(_reading_only)
        timer.start()
        rows = connection.execute(query).fetchmany(MOST_ROWS)
    except (sqlite3.Error, sqlite3.Warning, MemoryError) as error:
        slow = "interrupted" in str(error)
        return f"takes longer than {SECONDS:g} s" if slow else str(error)
    finally:
        timer.cancel()
        connection.close()
    return rows


READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
RECURSION = 33
"""SQLITE_RECURSIVE, which Python 3.11 does not define."""


def _reading_only(action: int, name: str | None, *_: object) -> int:
    """Deny everything except queries, and the function that loads libraries."""
    reads = action in (*READS, RECURSION) and name != "load_extension"
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


def same_result(predicted: Any, wanted: Any, query: str) -> bool:
    """Whether the rows are equal, in any order unless the reference has ORDER BY."""
    if isinstance(predicted, str) or isinstance(wanted, str):
        return False
    ordered = "order by" in " ".join(query.lower().split())
    return predicted == wanted if ordered else Counter(predicted) == Counter(wanted)


def _sql(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    scores, wrong = list[bool](), Counter[str]()
    for asked, given in rows:
        database = database_of(asked, settings)
        assert database is not None, "rows without one are refused"
        text = first(given).strip()
        fenced = FENCED.match(text.replace("```sql", "```", 1))
        predicted = result(database, fenced[1] if fenced else text)
        scores.append(same_result(predicted, result(database, asked.expected), asked.expected))
        if isinstance(predicted, str):
            wrong[predicted] += 1
    return [of_scores("sql", scores, binary=True, detail={"errors": dict(wrong.most_common(20))})]


def _unfit(asked: Asked, settings: Settings) -> str | None:
    database = database_of(asked, settings)
    if database is None:
        return "it names no SQLite file (column database); give --database FILE"
    if not database.is_file():
        return f"no such SQLite file: {database}"
    found = result(database, asked.expected)
    return f"its reference query fails on {database}: {found}" if isinstance(found, str) else None


SQL = Metric(
    "queries with the same result as the reference", ("sql",), _unfit, lambda *_: True, _sql
)
