"""The page of a run: its state, its curves, what it wrote, and what can be done with it."""

import math
import re
from typing import Any
from urllib.parse import urlencode

from finetune.board import commands, pages
from finetune.board.shelf import Shelf, history
from finetune.board.tasks import Task, Tasks, Words, first, tail
from finetune.errors import FinetuneError
from finetune.reports import comparison
from finetune.reports.drawings import Chart, Curve, Point, chart
from finetune.reports.run_sections import sections
from finetune.runs import units
from finetune.runs.progress import Watch
from finetune.runs.run import read_object
from finetune.runs.summary import read_samples

AXES = ("step", "hours", "tokens")
"""What curves are drawn over."""
NAMES = {
    "loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate",
    "tokens_per_second": "tokens per second", "mfu": "share of the peak rate", "memory": "memory",
    "data_seconds": "seconds of a step waited for rows", "router_aux_loss": "load-balancing loss",
}  # fmt: skip
SHOW = {"memory": units.size, "lr": units.learning_rate, "tokens_per_second": units.count}
MOST_SAMPLES = 20
SHOWN_LINES = 200
LEFT_OUT = ("Throughput and memory", "Warnings")
"""Sections of a report that need every step, or are shown above."""


def page(shelf: Shelf, tasks: Tasks, asked: Words) -> dict[str, Any]:
    """The values of the page of an address: `run`, and `x` for what curves are drawn over."""
    name, x = first(asked, "run"), first(asked, "x")
    watch = shelf.watch(name)
    read, whole = shelf.curves(name)
    problems = list[str]()
    found: dict[str, Any] = {"samples": [], "sections": []}
    for key, make in (
        ("samples", lambda: read_samples(watch.run)[:MOST_SAMPLES]),
        ("sections", lambda: _sections(watch)),
    ):
        try:
            found[key] = make()
        except FinetuneError as error:
            problems.append(str(error))
    x = x if x in AXES else "step"
    return {
        **head(shelf, tasks, name), **found,
        "title": name,
        "x": x,
        "axes": AXES,
        "read": whole,
        "charts": _charts(watch, read.values(), x),
        "problems": problems,
        "evaluations": _evaluations(watch),
        "log": log_of(shelf, tasks, name),
    }  # fmt: skip


def head(shelf: Shelf, tasks: Tasks, name: str) -> dict[str, Any]:
    """What changes while a run trains."""
    watch = shelf.watch(name)
    mine = tasks.of(name)
    shown, problem = pages.row(name, watch, shelf, mine), ""
    try:
        buttons = commands.buttons(watch)
    except (FinetuneError, OSError) as error:
        buttons, problem = [], str(error)
    waiting = read_object(watch.run.flight_records / "waiting.json")
    failed = shown["state"] in ("failed", "killed")
    last = [line for line in log_of(shelf, tasks, name) if line.strip()][-8:] if failed else []
    return {
        "run": name,
        "shown": shown,
        "problem": problem,
        "tiles": tiles(watch),
        "buttons": buttons,
        "tasks": mine[:12],
        "last_words": last,
        "warnings": watch.warnings[-5:],
        "late": waiting.get("ranks", []) if watch.locked else [],
    }


def tiles(watch: Watch) -> list[tuple[str, str, str]]:
    """The key figures: (name, value, small print)."""
    last, start, best = watch.last, watch.start, watch.best
    found = list[tuple[str, str, str]]()
    if watch.steps:
        share = f"of {watch.steps:,}, {units.share(watch.step, watch.steps)}"
        found.append(("step", f"{watch.step:,}", share))
    if not math.isnan(watch.loss):
        found.append(("loss", units.loss(watch.loss), "last step"))
    if best is not None:
        newest = watch.evaluations[-1]
        now = "the last" if newest is best else f"last {units.loss(_number(newest.get('loss')))}"
        found.append(("best evaluation", units.loss(best["loss"]), f"step {best['step']:,}, {now}"))
    if not math.isnan(watch.seconds_left):
        found.append(("left", units.duration(watch.seconds_left), "by the last steps"))
    if (rate := _number(last.get("tokens_per_second"))) > 0:
        mfu = _number(last.get("mfu"))
        peak = f"tokens/s, {mfu:.0%} of the peak" if mfu > 0 else "tokens per second"
        found.append(("speed", units.count(rate), peak))
    if peak := watch.measured.get("peak"):
        plan = watch.measured.get("predicted")
        about = f"planned {units.size(plan)}" if plan else "of tensors"
        found.append(("memory", units.size(peak), about))
    elif watch.peak_memory:
        found.append(("memory", units.size(watch.peak_memory), "peak, one process"))
    if trainable := start.get("trainable_parameters"):
        share = units.share(trainable, start.get("parameters") or 0)
        found.append(("trained", units.count(trainable), f"parameters, {share}"))
    if skipped := sum(each.get("kind") == "skip" for each in watch.warnings):
        found.append(("skipped", f"{skipped}", "steps, not finite"))
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _sections(watch: Watch) -> list[Any]:
    return [each for each in sections(watch.run, history(watch)) if each.name not in LEFT_OUT]


def _charts(watch: Watch, values: dict[str, Any], x: str) -> list[Chart]:
    """The curves as drawings, for a page without scripts and until they have run."""
    found = list[Chart]()
    for key in map(str, values["curves"]):
        curves = [Curve(NAMES.get(key, key), _points(values, key, x), "smooth")]
        if x == "step":
            measured = [(e.get("step", 0), _of(e, key)) for e in watch.evaluations]
            curves.append(Curve("evaluation", measured, "dots"))
        found.append(_chart(key, curves, x))
    return [each for each in found if each.drawing]


def _points(values: dict[str, Any], key: str, x: str) -> list[Point]:
    means = values["curves"].get(key, {}).get("mean", [])
    return [(at, _number(mean)) for at, mean in zip(values[x], means, strict=False)]


def _chart(key: str, curves: list[Curve], x: str) -> Chart:
    size, show = "wide" if key == "loss" else "small", SHOW.get(key, "{:.4g}".format)
    return chart(NAMES.get(key, key), curves, size=size, over=x, show=show)


def _of(evaluation: dict[str, Any], key: str) -> float:
    metrics = evaluation.get("metrics")
    values = {"loss": evaluation.get("loss")} | (metrics if isinstance(metrics, dict) else {})
    return _number(values.get(key))


def curves(shelf: Shelf, name: str, since: int) -> dict[str, Any]:
    """The curves as JSON, from a bucket on."""
    read, whole = shelf.curves(name)
    watch = shelf.watch(name)
    measured = list[dict[str, Any]]()
    for each in watch.evaluations:
        metrics = each.get("metrics")
        own = metrics if isinstance(metrics, dict) else {}
        measured.append({"step": each.get("step"), "loss": each.get("loss"), **own})
    best = watch.best
    return {
        **read.values(since),
        "whole": whole,
        "names": NAMES,
        "evaluations": measured,
        "saved": [each.get("step") for each in watch.saved],
        "best": best and best.get("step"),
    }


def live(shelf: Shelf, tasks: Tasks, name: str, trusted: bool) -> dict[str, str]:
    """The parts of the page that are replaced while it is open."""
    values = head(shelf, tasks, name)
    read, whole = shelf.curves(name)
    lines = log_of(shelf, tasks, name)
    return {
        "head": pages.rendered("head", **values),
        "actions": pages.rendered("actions", trusted=trusted, **values),
        "rows": f"{read.rows} {whole}",
        "log": pages.rendered("log", log=lines),
    }


def log_of(shelf: Shelf, tasks: Tasks, name: str) -> list[str]:
    """The last lines of a run's output."""
    lines = tail(shelf.watch(name).run.log)
    return [ESCAPES.sub("", line) for line in lines[-SHOWN_LINES:]]


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colors of a terminal."""


def _evaluations(watch: Watch) -> list[str]:
    """Names of the evaluations that have a page."""
    folder = watch.run.evaluations
    return sorted(path.parent.name for path in folder.glob("*/index.html") if path.is_file())


def evaluation(shelf: Shelf, name: str, evaluated: str) -> str:
    """The page that `finetune eval` wrote.

    Raises:
        FinetuneError: there is no such evaluation.
    """
    watch = shelf.watch(name)
    if evaluated not in _evaluations(watch):
        raise FinetuneError(f"{evaluated}: no such evaluation of {name}")
    path = watch.run.evaluations / evaluated / "index.html"
    return path.read_text(encoding="utf-8", errors="replace")


def compared(shelf: Shelf, asked: Words) -> dict[str, Any]:
    """The comparison of some runs: `run` for each, and `x` for what curves are drawn over.

    Raises:
        FinetuneError: fewer than two runs or too many, or a record that cannot be read.
    """
    names, x = asked.get("run", []), first(asked, "x")
    if not 2 <= len(names) <= comparison.MOST:
        raise FinetuneError(f"tick 2 to {comparison.MOST} runs to compare, got {len(names)}")
    x = x if x in AXES else "step"
    watches = [shelf.watch(name) for name in names]
    found = comparison.compared([w.run for w in watches], [history(w) for w in watches])
    read = [shelf.whole_curves(name).values() for name in names]
    keys = dict.fromkeys(key for values in read for key in values["curves"])
    named = list(enumerate(zip(found["names"], read, strict=True)))
    charts = [
        _chart(key, [Curve(n, _points(v, key, x), "smooth", at) for at, (n, v) in named], x)
        for key in keys
    ]
    measured = [
        Curve(name, [(e.get("step", 0), _of(e, "loss")) for e in w.evaluations], "dots", number)
        for number, (name, w) in enumerate(zip(found["names"], watches, strict=True))
    ]
    if x == "step" and any(len(each.points) > 1 for each in measured):
        charts.insert(1, chart("evaluation loss", measured, size="wide"))
    charts = [each for each in charts if each.drawing]
    return {
        "title": "compare",
        "layout": "base.html.jinja",
        "chosen": names,
        "charts": charts,
        "x": x,
        "axes": AXES,
        **found,
    }


def do(shelf: Shelf, tasks: Tasks, sent: Words) -> str:
    """Start what a button of a run is; returns the page that shows it.

    Raises:
        FinetuneError: the run has no such button now.
    """
    name, verb = first(sent, "run"), first(sent, "verb")
    begin(shelf, tasks, name, verb)
    return f"/{'chat' if verb == 'serve' else 'run'}?{urlencode({'run': name})}"


def begin(shelf: Shelf, tasks: Tasks, name: str, verb: str) -> Task:
    """Start the command of a verb for a run; raises FinetuneError as `do`."""
    watch = shelf.watch(name)
    found = next((each for each in commands.buttons(watch) if each.verb == verb), None)
    if found is None:
        state = pages.state_of(watch, tasks.of(name))
        raise FinetuneError(f"{verb}: not possible while {name} is {state}; reload the page")
    if any(task.verb == verb and task.is_open for task in tasks.of(name)):
        raise FinetuneError(f"{name}: `{found.command}` runs already")
    task = tasks.add(verb, found.words, name, watch.run.log if verb == "launch" else None)
    tasks.advance()
    return task


def change(shelf: Shelf, tasks: Tasks, sent: Words) -> str:
    """Stop, hold or release a task; returns the page that shows it."""
    task, what = tasks.find(first(sent, "id")), first(sent, "what")
    if task is None:
        raise FinetuneError(f"{first(sent, 'id')}: no such task; it may have been removed")
    if what == "stop":
        tasks.stop(task)
    elif what in ("pause", "resume"):
        tasks.hold(task, paused=what == "pause")
    else:
        raise FinetuneError(f"{what}: expected stop, pause or resume")
    return f"/run?{urlencode({'run': task.run})}" if task.run in shelf.watches() else "/"
