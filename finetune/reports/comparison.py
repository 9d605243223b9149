"""Compare several runs: differences of their recipes, their curves and their results."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.reports.drawings import Chart, Curve, Point, chart, finite, smooth
from finetune.reports.evaluation_page import between, shown
from finetune.reports.tables import Table, aligned, rendered
from finetune.runs import units
from finetune.runs.environment import public
from finetune.runs.metrics import History, read_history
from finetune.runs.run import Run, of_record, open_run, read_object
from finetune.runs.summary import throughput

MOST = 8
"""Maximum number of runs, which is the number of colors."""
MOST_ANSWERS = 20
ABSENT = "-"


def compare(roots: Sequence[str | Path]) -> dict[str, Any]:
    """The comparison of some runs, as values for `page` and `terminal`.

    Raises:
        FinetuneError: fewer than two runs, too many, or a run whose record cannot be read.
    """
    if not 2 <= len(roots) <= MOST:
        raise FinetuneError(f"compare: got {len(roots)} runs, expected 2 to {MOST}")
    return of_runs([open_run(root) for root in roots])


def of_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison of any number of runs, as values for `page` and `terminal`."""
    histories = [read_history(run) for run in runs]
    return compared(runs, histories) | {"charts": _charts(names_of(runs), histories)}


def compared(runs: Sequence[Run], histories: Sequence[History]) -> dict[str, Any]:
    """The comparison of some runs without curves: of their steps, only the last ones are read.

    Raises:
        FinetuneError: a record cannot be read, or one run is named twice.
    """
    names = names_of(runs)
    recipes = [catalog.flatten(public(read_object(run.recipe))) for run in runs]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    differing = [key for key in keys if len({_cell_text(r.get(key)) for r in recipes}) > 1]
    tables = [Table(
        [[key, *(_short(_cell_text(r.get(key))) for r in recipes)] for key in differing],
        ["", *names], "Recipes: differences",
    )]  # fmt: skip
    tables.append(Table(list(_result_rows(histories)), ["", *names], "Training"))
    tables += [*_evaluations(runs, names), _surroundings(runs, names)]
    return {
        "names": names,
        "tables": [table for table in tables if table.rows],
        "same_recipe": not differing,
        "answers": _answers(runs, names)[:MOST_ANSWERS] if runs else [],
    }


def page(found: Mapping[str, Any]) -> str:
    """The comparison as a self-contained HTML page."""
    about = {"title": ", ".join(found["names"]), "layout": "page.html.jinja"}
    return rendered("comparison.html.jinja", **about, **found)


def terminal(found: Mapping[str, Any]) -> list[str]:
    """The tables as lines of text."""
    lines = list[str]()
    if found["same_recipe"]:
        lines.append("the recipes are the same")
    for table in found["tables"]:
        rows = [[table.heading, *table.columns[1:]], *table.rows]
        lines += aligned([list(map(str, row)) for row in rows])
        lines.append("")
    return lines[:-1]


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names of the runs' folders, with as much of the path as makes them unique."""
    parts = [run.root.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise FinetuneError("compare: one run is named twice")


def _cell_text(value: Any) -> str:
    """A value as text; empty and disabled values are shown as absent."""
    if value in (None, False, [], {}, ""):
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."


def _result_rows(histories: Sequence[History]) -> Iterator[list[str]]:
    """Rows of the table of results."""
    rates = [throughput(history.trained) for history in histories]
    yield ["steps", *(f"{history.step:,}" for history in histories)]
    rewards = [h.trained[-1].metrics.get("reward") if h.trained else None for h in histories]
    if any(reward is not None for reward in rewards):
        yield ["training reward", *(_loss(reward) for reward in rewards)]
    yield ["training loss", *(_loss(h.trained[-1].loss if h.trained else None) for h in histories)]
    yield ["best eval loss", *(_loss(h.best.loss if h.best else None) for h in histories)]
    yield ["at step", *(f"{h.best.step:,}" if h.best else ABSENT for h in histories)]
    for name in dict.fromkeys(n for h in histories for e in h.evaluated for n in e.metrics):
        last = [h.evaluated[-1].metrics.get(name) if h.evaluated else None for h in histories]
        yield [name, *(_loss(each) for each in last)]
    yield ["tokens per second", *(units.count(r.tokens_per_second) if r else ABSENT for r in rates)]
    yield ["peak memory", *(units.size(h.peak_memory) for h in histories)]
    yield ["time", *(units.duration(h.seconds) for h in histories)]
    trained = [h.starts[-1].trainable_parameters if h.starts else None for h in histories]
    yield ["trained parameters", *(ABSENT if n is None else units.count(n) for n in trained)]


def _loss(value: float | None) -> str:
    return ABSENT if value is None else units.loss(value)


def _evaluations(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Table]:
    """Measures of each `finetune eval` that at least two runs have under the same name."""
    found = [
        {
            path.parent.name: read_object(path)
            for path in sorted(run.evaluations.glob("*/results.json"))
        }
        for run in runs
    ]
    for name in dict.fromkeys(name for each in found for name in each):
        with of_record(runs[0].evaluations):
            results = [each.get(name) for each in found]
            some = [each for each in results if each is not None]
            if len(some) < 2:
                continue
            measures = dict.fromkeys(measure for each in some for measure in each["measures"])
            rows = [[m, *(_value(each, m) for each in results)] for m in measures]
            same = len({each["rows"]["digest"] for each in some}) == 1
            note = "" if same else ", on different rows"
            yield Table(rows, ["", *names], f"Evaluation {name}{note}")


def _value(results: Mapping[str, Any] | None, measure: str) -> str:
    measured = None if results is None else results["measures"].get(measure)
    if measured is None:
        return ABSENT
    interval = between(measured.get("after_interval"), measured["unit"])
    value = shown(measured["after"], measured["unit"]) or ABSENT
    return f"{value} ({interval})" if interval else value


def _surroundings(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Where the data and the environments of the runs differ."""
    found = list[dict[str, Any]]()
    for run in runs:
        known = read_object(run.environment)
        data = {
            f"data.{split}": {key: counts.get(key) for key in ("sha256", "rows", "tokens")}
            for split, counts in read_object(run.data).items() if isinstance(counts, Mapping)
        }  # fmt: skip
        kept = {key: known.get(key) for key in ("versions", "python", "devices", "commit")}
        found.append(catalog.flatten(data | kept))
    keys = dict.fromkeys(key for each in found for key in each)
    cells = [[key, *(_short(_cell_text(each.get(key))) for each in found)] for key in keys]
    differing = [row for row in cells if len(set(row[1:])) > 1]
    return Table(differing, ["", *names], "Data and environment: differences")


def _answers(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Answers to the same rows, those first of which the last run lost most against the first."""
    found = list[dict[str, Any]]()
    for path in sorted(runs[0].evaluations.glob("*/results.json")):
        folders = [run.evaluations / path.parent.name for run in runs]
        results = [read_object(folder / path.name) for folder in folders]
        with of_record(path):
            same_rows = len({each["rows"]["digest"] if each else None for each in results}) == 1
            if not same_rows or not all((each / "samples.jsonl").is_file() for each in folders):
                continue
            files = [(folder / "samples.jsonl").read_text(encoding="utf-8") for folder in folders]
            rows = [[json.loads(line) for line in file.splitlines()] for file in files]
            for same in zip(*rows, strict=True):
                scores = [
                    each["scores"].get(results[0]["primary"], {}).get("after") for each in same
                ]
                known = [score or 0.0 for score in scores]
                answers = [
                    {"name": name, "text": each.get("after", ""), "right": score == 1.0}
                    for name, each, score in zip(names, same, scores, strict=True)
                ]
                asked = {"prompt": same[0]["prompt"], "expected": same[0]["expected"]}
                found.append({**asked, "answers": answers, "lost": known[0] - known[-1]})
    return sorted(found, key=lambda each: -each["lost"])


def _charts(names: Sequence[str], histories: Sequence[History]) -> list[Chart]:
    """Charts in which the curves of all runs are overlaid."""
    rewards = [[(r.step, r.metrics.get("reward", math.nan)) for r in h.trained] for h in histories]
    kinds: list[tuple[str, list[list[Point]]]] = [
        ("training reward", [smooth(points) for points in rewards]),
        ("training loss", [smooth([(r.step, r.loss) for r in h.trained]) for h in histories]),
        ("evaluation loss", [[(r.step, r.loss) for r in h.evaluated] for h in histories]),
    ]
    for metric in dict.fromkeys(n for h in histories for e in h.evaluated for n in e.metrics):
        kinds.append((metric, [
            [(r.step, r.metrics.get(metric, math.nan)) for r in h.evaluated] for h in histories
        ]))  # fmt: skip
    charts = list[Chart]()
    for kind, each in kinds:
        curves = [
            Curve(name, points, "smooth" if kind.startswith("training ") else "dots", number)
            for number, (name, points) in enumerate(zip(names, each, strict=True))
        ]
        if any(len(finite(curve.points)) > 1 for curve in curves):  # the table has single values
            charts.append(chart(kind, curves, size="wide"))
    return charts
