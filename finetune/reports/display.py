"""Show a run's progress on rank 0, in a terminal or a plain log.

In a terminal there is a progress bar below the lines. Elsewhere (a file, a pipe, a notebook) there
are only lines, without control characters, and few of them: see `Pace`.
"""

import dataclasses
import io
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from finetune.data.audit import EMPTY, describe
from finetune.reports.card import is_scorer
from finetune.runs import units
from finetune.runs.metrics import (
    Ended,
    Evaluated,
    Measured,
    Record,
    Saved,
    Skipped,
    Start,
    Trained,
    Warned,
    read_history,
    shown_metrics,
)
from finetune.runs.run import Run, read_object
from finetune.runs.summary import title

PLAIN_WIDTH = 100
"""Columns of a plain log."""
NARROW = 76
"""Columns of a terminal below which the bar shows only the loss and the time left."""
WIDE = 110
"""Columns from which the bar also shows metrics, the share of real tokens and MFU."""
REDRAW_SECONDS = 0.1
"""Minimum seconds between redraws of the bar: steps of a tiny model take a millisecond."""


@dataclasses.dataclass
class Pace:
    """Decides which steps get a line in a plain log.

    These are the first and the last step, every tenth of the steps, and steps for which the time
    since the last line is at least 10 s and 2 % of the time so far: about 300 lines in a day.
    """

    steps: int
    step: int = 0
    started: float = 0.0
    spoke: float = -math.inf

    def due(self, step: int, now: float) -> bool:
        tenth = step - self.step >= max(1, self.steps / 10)
        waited = now - self.spoke >= max(10.0, 0.02 * (now - self.started))
        if not (tenth or waited or step >= self.steps):
            return False
        self.step, self.spoke = step, now
        return True


class Display:
    """Shows each record of a run; its method `show` is a listener for `Metrics`."""

    def __init__(
        self,
        run: Run,
        *,
        is_main: bool = True,
        notes: Sequence[str] = (),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._notes = tuple(notes)
        self._console = console or open_console(is_main=is_main)
        self._clock = clock
        self._start: Start | None = None
        self._pace = Pace(steps=0)
        self._first: Trained | None = None
        self._latest: Trained | None = None
        self._counted: Measured | None = None
        self._evaluated: list[Evaluated] = []
        self._bar: tuple[Progress, TaskID] | None = None
        self._drawn = -math.inf

    def note(self, text: str) -> None:
        """Print a line about the current activity, such as loading the model."""
        self._say(f"[dim]{escape(text)}[/]")

    def show(self, record: Record) -> None:
        match record:
            case Start():
                self._begin(record)
            case Trained():
                self._step(record)
            case Measured():
                self._counted = record
            case Skipped() | Warned():
                self._say(f"[yellow]warning:[/] {escape(record.told)}")
            case Evaluated():
                self._say(self._evaluation_line(record))
                self._evaluated.append(record)
            case Saved():
                self._say(saved_line(self._run, record))
            case Ended():
                self._finish(record)

    def close(self) -> None:
        """Remove the bar, so that an error message gets its own lines."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _begin(self, start: Start) -> None:
        self._start, self._first, self._latest = start, None, None
        now = self._clock()
        self._pace = Pace(steps=start.steps, step=start.step, started=now)
        if start.resumed_from is not None:
            self._evaluated = list(read_history(self._run).evaluated)
        self._console.print(start_table(self._run, start))
        for note in self._notes:
            self._say(f"[yellow]note:[/] {escape(note)}")
        if self._console.is_terminal:
            self._bar = open_bar(self._console, start)

    def _step(self, record: Trained) -> None:
        self._first = self._first or record
        self._latest = record
        now = self._clock()
        if self._bar is not None:
            self._draw(record, now)
        elif self._pace.due(record.step, now):
            total = self._pace.steps
            line = f"step {record.step:>{len(str(total))}}/{total}  {record.step / total:>4.0%}  "
            facts = "  ".join(step_facts(record, self._seconds_left(record)))
            self._say((line + facts).rstrip())

    def _draw(self, record: Trained, now: float) -> None:
        assert self._bar is not None
        if now - self._drawn < REDRAW_SECONDS and record.step < self._pace.steps:
            return
        self._drawn = now
        bar, task = self._bar
        loss, lr, speed, *shares, memory, left = step_facts(record, self._seconds_left(record))
        shown = [lr, speed, *(shares if self._console.width >= WIDE else ()), memory]
        middle = "  " + "  ".join(shown) if self._console.width >= NARROW else ""
        facts = f"[bold]{loss}[/]{middle}  [cyan]{left}[/]"
        bar.update(task, completed=record.step, facts=facts, refresh=True)

    def _seconds_left(self, record: Trained) -> float:
        """Estimate from the wall time since this process's first step, including all work."""
        assert self._first is not None
        made = record.step - self._first.step
        if made == 0:
            return math.nan
        return (record.time - self._first.time) / made * (self._pace.steps - record.step)

    def _evaluation_line(self, record: Evaluated) -> str:
        line = f"[bold]eval[/]  step {record.step}  loss [bold]{units.loss(record.loss)}[/]"
        if self._evaluated:
            line += f"  ({record.loss - self._evaluated[-1].loss:+.4f})"
        line += "  [green]* best[/]" if record.best else ""
        line = "  ".join([line, *shown_metrics(record.metrics)])
        unit = self._start.unit if self._start is not None else "tokens"
        return f"{line}  {units.count(record.tokens)} {unit} in {units.duration(record.seconds)}"

    def _finish(self, end: Ended) -> None:
        self.close()
        table = end_table(self._run, end, self._latest, self._evaluated, self._counted)
        self._console.print(table)
        for purpose, command in next_commands(self._run, end):
            self._say(f"  {purpose:<8}[bold]{escape(command)}[/]")

    def _say(self, line: str) -> None:
        """Print one line of markup without folding it, so that commands can be copied."""
        self._console.print(line, highlight=False, soft_wrap=True)


def open_console(*, is_main: bool) -> Console:
    """A console on standard output, with plain lines unless it is a terminal.

    By itself, Rich would treat a pipe as a terminal if FORCE_COLOR is set, which Jupyter's kernel
    does for every process that a notebook starts.
    """
    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):  # an unprintable path must not end the training
        sys.stdout.reconfigure(errors="replace")
    return Console(
        force_terminal=terminal,
        force_jupyter=False,
        width=None if terminal else PLAIN_WIDTH,
        quiet=not is_main,
    )


def open_bar(console: Console, start: Start) -> tuple[Progress, TaskID]:
    """A bar that is redrawn at the end of a step, without a background thread."""
    bar = Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[facts]}"),
        console=console,
        auto_refresh=False,
        expand=True,
        transient=True,
    )
    bar.start()
    return bar, bar.add_task("", total=start.steps, completed=start.step, facts="")


def fill(real_tokens: int, slots: int) -> str:
    """Share of slots with a token, or of tokens in shared prompts that are not computed again."""
    if real_tokens > slots:
        return f"{1 - slots / real_tokens:.0%} shared"
    return f"{real_tokens / slots:.0%} real"


def step_facts(record: Trained, seconds_left: float) -> tuple[str, ...]:
    """Loss, learning rate, speed, metrics, `fill`, MFU, memory and time left."""
    left = f"{units.duration(seconds_left)} left" if math.isfinite(seconds_left) else ""
    return (
        f"loss {units.loss(record.loss)}",
        f"lr {units.learning_rate(record.lr)}",
        f"{units.count(record.tokens_per_second)} tokens/s",
        *shown_metrics(record.metrics),
        fill(record.real_tokens, record.slots),
        *([] if math.isnan(record.router_aux_loss) else [f"router {record.router_aux_loss:.4f}"]),
        *([] if math.isnan(record.mfu) else [f"{record.mfu:.0%} MFU"]),
        units.size(record.memory),
        left,
    )


def start_table(run: Run, start: Start) -> Table:
    """Table of the training, its data and its run directory, printed at the start."""
    table = _table(title(read_object(run.recipe)))
    trainable = units.share(start.trainable_parameters, start.parameters)
    table.add_row(
        "trains",
        f"{units.count(start.trainable_parameters)} of {units.count(start.parameters)} parameters "
        f"({trainable})",
    )
    processes = "1 process" if start.processes == 1 else f"{start.processes} processes"
    readers = processes
    if start.groups is not None:
        readers = f"{start.groups} group{'s' * (start.groups > 1)} of processes"
    table.add_row(
        "batch", f"{start.rows_per_step} {_unit_of_rows(start)} = {start.shares} x {readers}"
    )
    if start.padding:
        table.add_row("", escape(start.padding))
    used = start.steps * start.rows_per_step / start.rows_per_sample
    held_out = f"{start.eval_rows:,} held out" if start.eval_rows else "none held out"
    if start.train_rows:
        passes = used / start.train_rows
        table.add_row("steps", f"{start.steps:,}, which is {passes:.2f} passes over the data")
        trained = units.count(start.trained_tokens)
        rows = f"{start.train_rows:,} rows with {trained} trained tokens"
    else:
        table.add_row("steps", f"{start.steps:,}, which take {used:,.0f} rows")
        rows = "a stream, prepared while steps run"
    table.add_row("data", f"{rows}; {held_out}")
    counted = read_object(run.data)
    lines = describe(counted["train"]) if counted.get("train") else []
    if lines and not start.train_rows:
        lines[0] = f"rows looked at: {lines[0]}"
    lines += [f"held out: {line}" for line in describe(counted.get("eval") or EMPTY)[1:]]
    for line in lines:
        table.add_row("", escape(line))
    if run.bad_rows.is_file():
        table.add_row("", escape(f"bad rows are listed in {run.bad_rows}"))
    table.add_row("backend", f"{start.backend}, {start.precision}, {processes}")
    if start.resumed_from is not None:
        table.add_row("resumes", f"from the checkpoint of step {start.resumed_from:,}")
    table.add_row("run", escape(str(run.root)))
    return table


def _unit_of_rows(start: Start) -> str:
    if start.packing:
        return "packs"
    return start.unit if start.unit in ("pairs", "completions") else "rows"


def saved_line(run: Run, record: Saved) -> str:
    place = run.checkpoint(record.step).name
    return f"[dim]saved {place}  {units.size(record.bytes)} in {units.duration(record.seconds)}[/]"


def end_table(
    run: Run,
    end: Ended,
    latest: Trained | None,
    evaluated: Sequence[Evaluated],
    counted: Measured | None = None,
) -> Table:
    """Summary table, printed at the end of a run."""
    table = _table(end.reason.capitalize())
    table.add_row("steps", f"{end.step:,} in {units.duration(end.seconds)}")
    if latest is not None:
        name, value = _outcome(latest)
        table.add_row(f"final {name}", f"{value} on the last training batch")
    finite = [record for record in evaluated if math.isfinite(record.loss)]
    best = min(finite, key=lambda record: record.loss, default=None)
    best_text = f"{_outcome(best)[1]} at step {best.step:,}" if best else "not evaluated"
    table.add_row("best eval", best_text)
    table.add_row("speed", f"{units.count(end.tokens_per_second)} tokens/s")
    table.add_row("memory", f"{units.size(end.peak_memory)} at the peak")
    if foreseen := predicted_and_measured(run, latest, counted):
        table.add_row("predicted", foreseen)
    table.add_row("run", escape(str(run.root)))
    return table


def _outcome(record: Trained | Evaluated) -> tuple[str, str]:
    """The number that training is about, with its name: the loss, or the mean reward."""
    if (reward := record.metrics.get("reward")) is not None:
        return "reward", f"{reward:.4f}"
    return "loss", units.loss(record.loss)


TOLD_APART = 0.05
"""Relative difference of a measured peak from its prediction that is explained."""


def predicted_and_measured(run: Run, latest: Trained | None, counted: Measured | None) -> str:
    """Predicted and measured memory and step time as text; empty without a prediction."""
    parts: list[str] = []
    if counted is not None and counted.predicted is not None:
        parts.append(
            f"{units.size(counted.predicted)} of tensors (measured {units.size(counted.peak)})"
        )
        apart = counted.peak / counted.predicted - 1
        if abs(apart) > TOLD_APART and counted.parts:
            planned = max(counted.parts, key=lambda stage: sum(stage.values()))
            largest = sorted(planned, key=lambda name: -planned[name])[:2]
            parts[-1] += f": {apart:+.0%}, planned most for {' and '.join(largest)}"
    step = (read_object(run.plan).get("prediction") or {}).get("step_seconds")
    if step is not None and latest is not None:
        measured = units.duration(latest.seconds)
        parts.append(f"{units.duration(step)} a step (last took {measured})")
    return ", ".join(parts)


def next_commands(run: Run, end: Ended) -> list[tuple[str, str]]:
    """Suggested next commands: (purpose, command)."""
    root = shlex.quote(str(run.root))
    report = ("report", f"finetune report {root}")
    if end.reason == "interrupted":
        return [("resume", "the same command with --resume"), report]
    merge = " --merge" if read_object(run.recipe).get("adapter") else ""
    target = shlex.quote(f"{run.root}-merged" if merge else f"{run.root}-export")
    scores = is_scorer(read_object(run.final / "config.json"))
    return [
        *([] if scores else [("chat", f"finetune chat {root}")]),
        ("export", f"finetune export {root} --to {target}{merge}"),
        report,
    ]


def _table(heading: str) -> Table:
    table = Table(
        title=escape(heading),
        title_style="bold",
        title_justify="left",
        box=box.ROUNDED,
        show_header=False,
        padding=(0, 1),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table
