"""Make the sections of a run's page that are tables, from its record."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.tally import UNUSUAL
from finetune.planner.mesh import AXES, Mesh
from finetune.reports.proof_page import proof_tables
from finetune.reports.tables import Cell, Table, cell_of, is_plain, tables, words
from finetune.runs import units
from finetune.runs.attempts import cost
from finetune.runs.metrics import History, Warned
from finetune.runs.run import Run, of_record, read_object
from finetune.runs.summary import read_completions, throughput

SAMPLING = "sampling/memory"
"""Metric with the memory of an online method's first sampling."""
NAMES: Mapping[str, str] = {
    **{name: f"samples {said}" for name, said in UNUSUAL.items()},
    "bad": UNUSUAL["bad"],
    "tied": UNUSUAL["tied"],
    "duplicates": "duplicates",
    "split": "samples split into several rows",
    "overlong": "samples longer than the maximum length",
    "unended": "sequences whose end is not trained",
    "documents": "sequences",
    "documents_per_row": "sequences per row",
    "longest": "longest sequence, tokens",
    "longest_sample": "longest sample before truncation, tokens",
    "mean_length": "mean sequence, tokens",
    "filled": "share of packs filled with tokens",
    "longer_chosen": "share of pairs with a longer chosen answer",
    "wanted": "answers labelled as wanted",
    "fixed_date": "rendered with a fixed date",
    "first": "first of them",
    "columns_unread": "columns that are not read",
}
"""Names of counts for readers, where they differ."""
HASH = "sha256"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page."""

    name: str
    tables: Sequence[Table] = ()


def sections(run: Run, history: History) -> list[Section]:
    """The sections that are not empty, in the page's order."""
    return [section for section in _sections(run, history) if section.tables]


def _sections(run: Run, history: History) -> Iterator[Section]:
    def environment() -> list[Table]:
        known = read_object(run.environment)
        return list(tables({name: value for name, value in known.items() if name != "command"}))

    parts: list[tuple[str, Path, Callable[[], Sequence[Table]]]] = [
        ("Warnings", run.metrics, lambda: _warnings(history)),
        ("Evaluations", run.metrics, lambda: _evaluations(history)),
        ("Sampled completions", run.completions, lambda: _completions(run)),
        ("Checkpoints", run.metrics, lambda: _checkpoints(run, history)),
        ("Throughput and memory", run.metrics, lambda: _rates(history)),
        ("Cost", run.attempts, lambda: _cost(run)),
        ("Data", run.data, lambda: [*_data_tables(read_object(run.data))]),
        ("Backend", run.realised, lambda: [*_backend(history), *_realised(run)]),
        ("Memory of each process", run.metrics, lambda: _processes(run, history)),
        ("Plan", run.plan, lambda: _plan(run, history)),
        ("Proofs", run.proof, lambda: proof_tables(read_object(run.proof))),
        ("Environment", run.environment, environment),
    ]
    for name, record, made in parts:
        with of_record(record):
            yield Section(name, made())


def _evaluations(history: History) -> list[Table]:
    evaluated, best = history.evaluated, history.best
    if not evaluated:
        return []
    unit = history.starts[-1].unit if history.starts else "tokens"
    names = list(evaluated[-1].metrics)
    rows: list[tuple[Cell, ...]] = []
    for before, record in zip([None, *evaluated], evaluated, strict=False):
        change = f"{record.loss - before.loss:+.4f}" if before else None
        rows.append(
            (
                record.step,
                units.loss(record.loss),
                change,
                *([f"{math.exp(min(record.loss, 700)):.4g}"] if unit == "tokens" else []),
                *(f"{record.metrics.get(name, math.nan):.4g}" for name in names),
                record.tokens,
                units.duration(record.seconds),
                "best" if record is best else "",
            )
        )
    perplexity = ["perplexity"] if unit == "tokens" else []
    columns = ("step", "loss", "change", *perplexity, *names, unit, "time", "")
    return [Table(rows, columns)]


def _cost(run: Run) -> list[Table]:
    """What a job of a scheduler cost."""
    found = cost(run)
    if found is None:
        return []
    rows: list[tuple[Cell, ...]] = [
        ("starts", found.attempts),
        ("waiting for machines", units.duration(found.waiting)),
        ("machines held", units.duration(found.allocated)),
        ("share of it in steps", f"{found.stepping:.1%}"),
        ("steps that were lost", found.lost_steps),
    ]
    rows += [] if math.isnan(found.price) else [("price", f"{found.price:,.2f}")]
    return [Table(rows)]


def _warnings(history: History) -> list[Table]:
    rows: list[tuple[Cell, ...]] = [
        (record.step, record.told) for record in history.records if isinstance(record, Warned)
    ]
    return [Table(rows, ("step", ""))] if rows else []


def _completions(run: Run) -> list[Table]:
    """Completions of the first and the newest sampling, with their rewards."""
    found = read_completions(run)
    if not found:
        return []
    steps = dict.fromkeys((found[0]["step"], found[-1]["step"]))
    return [_sampling(step, [each for each in found if each["step"] == step]) for step in steps]


def _sampling(step: int, found: Sequence[Mapping[str, Any]]) -> Table:
    names = list(found[0]["rewards"])
    rows: list[tuple[Cell, ...]] = []
    before = None
    for each in found:
        scores = [each["rewards"].get(name) for name in names]
        numbers = [None if n is None else f"{n:.4g}" for n in (each["reward"], *scores)]
        end = "" if each["ended"] else " [cut]"
        asked = each["prompt"] if each["prompt"] != before else ""
        rows.append((asked, f"{each['completion']}{end}", *numbers, f"{each['advantage']:+.3g}"))
        before = each["prompt"]
    columns = ("prompt", "completion", "reward", *names, "advantage")
    return Table(rows, columns, f"sampled before step {step + 1}")


def _rates(history: History) -> list[Table]:
    rates = throughput(history.trained)
    if rates is None:
        return []
    evaluating = sum(record.seconds for record in history.evaluated)
    saving = sum(record.seconds for record in history.saved)
    other = max(0.0, history.seconds - rates.step_seconds - evaluating - saving)
    shared = rates.real_tokens - rates.slots  # tokens of prompts that were computed once
    again = units.share(shared, rates.real_tokens)
    speed = [
        ("tokens per second", f"{rates.tokens_per_second:,.1f}"),
        ("tokens", rates.real_tokens),
        (
            "tokens with a loss",
            f"{rates.trained_tokens:,} ({units.share(rates.trained_tokens, rates.real_tokens)})",
        ),
        ("padding", units.share(max(0, -shared), rates.slots)),
        *[("tokens of shared prompts, not computed again", again)] * (shared > 0),
        ("median step", units.duration(rates.median_seconds)),
        ("slowest step", f"{units.duration(rates.slowest_seconds)} (step {rates.slowest_step:,})"),
        ("peak memory of one process", units.size(history.peak_memory)),
    ]
    spent = [
        (name, units.duration(seconds), units.share(seconds, history.seconds))
        for name, seconds in (
            ("steps", rates.step_seconds),
            ("evaluations", evaluating),
            ("checkpoints", saving),
            ("other", other),
            ("in all", history.seconds),
        )
    ]
    return [Table(speed), Table(spent, ("time spent on", "time", "share"))]


def _checkpoints(run: Run, history: History) -> list[Table]:
    there, best = run.steps(), run.best_step()
    losses = {record.step: record.loss for record in history.evaluated}
    saved = {record.step: record for record in history.saved}
    rows: list[tuple[Cell, ...]] = []
    for step in sorted({*there, *saved}):
        record = saved.get(step)
        marks = ["best"] * (step == best) + ["newest"] * (step == run.newest())
        rows.append(
            (
                step,
                units.loss(losses[step]) if step in losses else None,
                units.size(record.bytes) if record else None,
                units.duration(record.seconds) if record else None,
                "kept" if step in there else "removed",
                ", ".join(marks),
            )
        )
    columns = ("step", "eval loss", "size", "time to save", "", "")
    return [Table(rows, columns)] if rows else []


def _data_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """The counts of all splits side by side, then the sources, roles and places of each split."""
    splits = {name: part for name, part in record.items() if isinstance(part, Mapping)}
    names = dict.fromkeys(
        name
        for part in splits.values()
        for name in part
        if name != HASH and is_plain(part[name]) and part[name]
    )
    rows = [
        [_name(name), *(cell_of(name, part.get(name)) for part in splits.values())]
        for name in names
    ]
    if rows:
        yield Table(rows, ("", *map(words, splits)))
    hashes = [(words(split), part[HASH]) for split, part in splits.items() if HASH in part]
    if hashes:
        yield Table(hashes, heading=HASH)
    for split, part in splits.items():
        for name, value in part.items():
            if name not in (*names, HASH) and (rest := _without_zeros(value)):
                named = {_name(k): v for k, v in rest.items()} if name == "first" else rest
                yield from tables(named, f"{words(split)}, {_name(name)}")
    others = {name: value for name, value in record.items() if name not in splits}
    if others:
        yield from tables(others)


def _name(name: str) -> str:
    return NAMES.get(name, words(name))


def _without_zeros(value: Any) -> Any:
    """A value of a record without counts that are zero, and without empty parts."""
    if isinstance(value, Mapping):
        return {name: rest for name, each in value.items() if (rest := _without_zeros(each))}
    return [_without_zeros(each) for each in value] if isinstance(value, list) else value


def _backend(history: History) -> list[Table]:
    if not history.starts:
        return []
    rows: list[tuple[Cell, ...]] = []
    for start in history.starts:
        batch = f"{start.rows_per_step} = {start.micro_rows} x {start.accumulation}"
        batch += f" x {start.groups or start.processes}"
        rows.append((start.step, start.backend, start.precision, start.processes, batch))
    columns = (
        "from step",
        "backend",
        "precision",
        "processes",
        "rows = micro x accum. x processes",
    )
    return [Table(rows, columns)]


def _realised(run: Run) -> list[Table]:
    """What Accelerate built, and the number of elements held by each rank."""
    realised = read_object(run.realised)
    ranks = realised.pop("ranks", [])
    counts = [{"rank": rank, **elements} for rank, elements in enumerate(ranks)]
    built = list(tables(realised))
    return [*built, *tables(counts, "elements held by each rank")] if counts else built


def _processes(run: Run, history: History) -> list[Table]:
    """Measured and planned peak memory of each process, with its position in the mesh."""
    counted = history.measured[-1] if history.measured else None
    if counted is None or len(counted.peaks) < 2:
        return []
    plan = read_object(run.plan)
    sizes = {axis: plan.get("mesh", {}).get(axis, 1) for axis in AXES}
    mesh, rows = Mesh(**sizes), list[tuple[Cell, ...]]()
    for rank, peak in enumerate(counted.peaks):
        planned = counted.planned[rank] if counted.planned else None
        ratio = f"{peak / planned:.2f}" if planned else None
        predicted = units.size(planned) if planned else None
        rows.append((rank, mesh.where(rank), predicted, units.size(peak), ratio))
    columns = ("rank", "place", "planned", "measured", "measured / planned")
    return [Table(rows, columns)]


def _plan(run: Run, history: History) -> list[Table]:
    """Predicted values next to measured values of the same name, then the rest of the plan."""
    plan = read_object(run.plan)
    if history.measured and plan.get("prediction"):  # for rows of the measured length
        counted = history.measured[-1].predicted
        plan = plan | {"prediction": plan["prediction"] | {"peak_memory": counted}}
    measured = _measured(history)
    compared: list[tuple[Cell, ...]] = []
    for name, predicted in _leaves(plan):
        if name in measured:
            known = measured[name]
            ratio = None
            if isinstance(predicted, int | float) and isinstance(known, int | float) and predicted:
                ratio = f"{known / predicted:.2f}"
            compared.append((words(name), cell_of(name, predicted), cell_of(name, known), ratio))
    columns = ("", "predicted", "measured", "measured / predicted")
    beside = [Table(compared, columns, "predicted and measured")] if compared else []
    return [*beside, *tables({k: v for k, v in plan.items() if k not in measured})]


def _measured(history: History) -> dict[str, Cell]:
    """Measured values that can be compared with a plan, by name."""
    if not history.starts:
        return {}
    names = ("backend", "precision", "processes", "micro_rows", "accumulation", "rows_per_step")
    names += ("steps", "trainable_parameters", "parameters", "train_rows", "trained_tokens")
    start = dataclasses.asdict(history.starts[-1])
    measured: dict[str, Cell] = {name: start[name] for name in names}
    if start["padding"]:
        measured["padding"] = start["padding"]
    rates = throughput(history.trained)
    if rates is not None:
        counted = history.measured[-1].peak if history.measured else history.peak_memory
        measured["peak_memory"] = counted
        measured["tokens_per_second"] = rates.tokens_per_second
        measured["step_seconds"] = rates.median_seconds
        measured["seconds"] = history.seconds
    sampled = [r.metrics[SAMPLING] for r in history.trained if SAMPLING in r.metrics]
    if sampled:
        measured["sampling_memory"] = sampled[0]
    return measured


def _leaves(value: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner)
        elif not isinstance(inner, list):
            yield name, inner
