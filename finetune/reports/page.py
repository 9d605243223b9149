"""Write the report of a run, for `finetune report`.

The page is self-contained: no scripts, fonts or requests. A section is left out if its records are
missing, so runs in progress, killed runs and runs without evaluation have a page too.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.backend.axes import Axes
from finetune.planner import schedules
from finetune.planner.estimate.moments import Moment
from finetune.planner.mesh import AXES, Mesh
from finetune.reports.drawings import Chart, Curve, Drawings, Size, chart, loss_curves
from finetune.reports.run_sections import sections
from finetune.reports.tables import rendered
from finetune.runs import units
from finetune.runs.environment import public
from finetune.runs.metrics import Evaluated, History, Trained, read_history
from finetune.runs.run import Run, of_record, read_object, write_whole
from finetune.runs.summary import exact_answers, read_samples, throughput, title, verdict

SHOWN_SAMPLES = 50
"""Maximum generations on the page; the file has all of them."""


def report(run: Run) -> Path:
    """Write `report.html` from the record; returns its path.

    Raises FinetuneError if a record has an unknown structure.
    """
    history = read_history(run)
    recipe, samples = read_object(run.recipe), read_samples(run)
    with of_record(run.recipe):
        heading, lines = title(recipe), _recipe_lines(public(recipe))
    with of_record(run.metrics):
        status = verdict(history, time.time())
        state, tiles, charts = _state(history), _tiles(history), _charts(history)
    with of_record(run.samples):
        exact = exact_answers(samples)
    with of_record(run.environment):
        command = shlex.join(read_object(run.environment).get("command", []))
    parts = sections(run, history)
    with of_record(run.plan):
        drawn, waits = _drawings(run, history)
    with of_record(run.root):
        text = rendered(
            "report.html.jinja",
            name=run.root.resolve().name,
            title=heading,
            verdict=status,
            state=state,
            tiles=tiles,
            charts=charts,
            drawings=drawn,
            waits=waits,
            sections=parts,
            samples=samples[:SHOWN_SAMPLES],
            exact=exact,
            more_samples=len(samples) - SHOWN_SAMPLES,
            recipe=lines,
            command=command,
        )
    write_whole(run.report, text)
    return run.report


def _state(history: History) -> str:
    """Text of the status badge."""
    if not history.starts:
        return "not started"
    if history.trained and not math.isfinite(history.trained[-1].loss):
        return "not finite"
    return history.end.reason if history.end else "no end recorded"


def _tiles(history: History) -> list[tuple[str, str, str]]:
    """The key figures: (name, value, small print)."""
    if not history.starts:
        return []
    start, best, rates = history.starts[-1], history.best, throughput(history.trained)
    tiles = [("steps", f"{history.step:,}", f"of {start.steps:,}")]
    if start.unit == "completions":
        tiles += _reward_tiles(history)
    elif best is not None:
        tiles.append(("best eval loss", units.loss(best.loss), f"at step {best.step:,}"))
    if history.trained and start.unit != "completions":
        tiles.append(("training loss", units.loss(history.trained[-1].loss), "last step"))
    if rates is not None:
        tiles.append(("speed", units.count(rates.tokens_per_second), "tokens per second"))
        tiles.append(("memory", units.size(history.peak_memory), "peak, one process"))
    tiles.append(("time", units.duration(history.seconds), "in all"))
    trainable = units.share(start.trainable_parameters, start.parameters)
    tiles.append(("trained", units.count(start.trainable_parameters), f"parameters, {trainable}"))
    return tiles


def _reward_tiles(history: History) -> list[tuple[str, str, str]]:
    """Rewards of the last samples and evaluation, as the loss of an online method says little."""
    tiles: list[tuple[str, str, str]] = []
    if history.trained and "reward" in history.trained[-1].metrics:
        reward = history.trained[-1].metrics["reward"]
        tiles.append(("reward", f"{reward:.3g}", "samples of the last step"))
    if history.evaluated:
        record = history.evaluated[-1]
        for name, value in record.metrics.items():
            if name.startswith("rewards/"):
                held_out = f"{record.tokens:,} held-out prompts, greedy"
                tiles.append((name.split("/")[1], f"{value:.3g}", held_out))
    return tiles


def _charts(history: History) -> list[Chart]:
    """The charts that have at least one value."""
    trained = history.trained
    online = bool(history.starts) and history.starts[-1].unit == "completions"
    curves, best = loss_curves(history), history.best
    charts = list[Chart]()
    if online:  # the loss of an evaluation is its negative reward
        charts.append(_measured(history, "reward", "wide"))
        charts.append(chart("loss", curves[:-1]))
    else:
        place = (best.step, best.loss) if best else None
        charts.append(chart("loss", curves, size="wide", best=place))
    scale, unit = (2**30, "GiB") if history.peak_memory >= 2**30 else (2**20, "MiB")
    for name, points, show in (
        ("learning rate", [(r.step, r.lr) for r in trained], units.learning_rate),
        ("load-balancing loss", [(r.step, r.router_aux_loss) for r in trained], "{:.4g}".format),
        ("gradient norm", [(r.step, r.grad_norm) for r in trained], "{:.4g}".format),
        ("tokens per second", [(r.step, r.tokens_per_second) for r in trained], _thousands),
        (f"memory, {unit}", [(r.step, r.memory / scale) for r in trained], "{:.4g}".format),
    ):
        charts.append(chart(name, [Curve(name, points, "smooth")], show=show, from_zero=True))
    records = (*trained, *history.evaluated)
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        if not (online and name == "reward"):
            charts.append(_measured(history, name, "small"))
    return [each for each in charts if each.drawing]


def _measured(history: History, name: str, size: Size) -> Chart:
    """The chart of a metric in training and in evaluations."""

    def points(records: Sequence[Trained | Evaluated]) -> list[tuple[float, float]]:
        return [(record.step, record.metrics.get(name, math.nan)) for record in records]

    trained = Curve("training", points(history.trained), "smooth")
    evaluated = Curve("evaluation", points(history.evaluated), "dots")
    return chart(name, [trained, evaluated], size=size)


def _drawings(run: Run, history: History) -> tuple[Drawings | None, str]:
    """The drawings of a run's plan beside its measurements, and the pipeline's bubble as text.

    None with one process or without a prediction.
    """
    plan = read_object(run.plan) if run.plan.is_file() else {}
    prediction = plan.get("prediction") or {}
    if plan.get("processes", 1) < 2 or "layers" not in prediction:
        return None, ""
    mesh = Mesh(**{axis: plan["mesh"].get(axis, 1) for axis in (*AXES, "experts")})
    sizes = {axis: getattr(mesh, axis) for axis in ("pipeline", "sequence", "tensor", "experts")}
    axes = Axes(**sizes, schedule=plan.get("schedule", "1F1B"))
    peaks, fullest = list[Moment](), list[int]()
    if history.measured:
        counted = history.measured[-1]
        peaks = [Moment("", dict(parts)) for parts in counted.parts]
        each = len(counted.peaks) // max(1, len(peaks))
        fullest = [max(counted.peaks[at * each : (at + 1) * each]) for at in range(len(peaks))]
    count = plan["accumulation"]
    layers, sent = prediction["layers"], prediction["sent"]
    drawings = Drawings(axes, mesh, layers, sent, count, mesh.processes, peaks, measured=fullest)
    waits = schedules.bubble(axes, count)
    return drawings, f"{axes.schedule}: a stage waits {waits:.1%} of a step"


def _thousands(value: float) -> str:
    return f"{value / 1000:g}K" if abs(value) >= 1000 else f"{value:g}"


def _recipe_lines(recipe: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """The recipe as YAML, one block per section, as lines of (indented key, value)."""
    plain = {
        name: value
        for name, value in recipe.items()
        if not isinstance(value, Mapping | list) or not value
    }
    parts = [plain, *({name: value} for name, value in recipe.items() if name not in plain)]
    blocks = []
    for part in filter(None, parts):
        text = yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=60)
        blocks.append([_key_and_value(line) for line in text.splitlines()])
    return blocks


def _key_and_value(line: str) -> tuple[str, str]:
    key, colon, value = line.partition(": ")
    if colon or line.endswith(":"):
        return key + colon, value
    return "", line
