"""Train trials of a recipe with values that optuna chooses from the results so far.

SWEEP/
  sweep.json     the recipe and the words of the sweep
  optuna.db      optuna's record of the trials
  index.html     all trials, and a comparison of the best
  trial-000/     the run of each trial
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from finetune import catalog
from finetune.errors import FinetuneError, Interrupted, reading
from finetune.reports import comparison
from finetune.reports.tables import Table, aligned
from finetune.runs import units
from finetune.runs.metrics import Evaluated, judged_by, parse
from finetune.runs.run import Run, write_whole
from finetune.version import install

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.trial import FrozenTrial

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
TOP_COMMA = re.compile(r",(?![^\[({]*[\])}])")
"""A comma that is not inside of brackets."""
SECONDS_BETWEEN_LOOKS = 0.5
RECORD = "optuna.db"
STATES = {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed", "RUNNING": "trains"}
"""optuna's states of a trial that began, in the table."""


@dataclasses.dataclass(frozen=True)
class Space:
    """The values of a field that a sweep searches: a range, or a list of choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def ends(self) -> tuple[str, ...]:
        """The choices, or the ends of the range, as words of an override."""
        return self.choices or (repr(self.low), repr(self.high))

    def suggest(self, trial: "Trial") -> str:
        """The value of a trial, as a word of an override."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        kind = trial.suggest_float if isinstance(self.low, float) else trial.suggest_int
        return repr(kind(self.key, self.low, self.high, log=self.log))


def space_of(recipe: str, pair: str) -> Space | None:
    """What a `key=value` searches; None if it is an override of all trials.

    `1e-5..1e-3`, `1..8` and `1e-5..1e-3:log` are ranges; `8,16,32` are choices, unless the field
    accepts this as its value.

    Raises:
        FinetuneError: a range is empty, or its logarithm does not exist.
    """
    key, _, text = pair.partition("=")
    if found := RANGE.fullmatch(text):
        kind = int if found[1].isdigit() and found[2].isdigit() else float
        low, high = kind(found[1]), kind(found[2])
        if not low < high or (found[3] and low <= 0):
            least = " above 0" if found[3] else ""
            raise FinetuneError(f"{pair}: expected LOW..HIGH with a lower LOW{least}")
        return Space(key, low, high, bool(found[3]))
    choices = tuple(each.strip() for each in TOP_COMMA.split(text))
    if len(choices) < 2:
        return None
    with contextlib.suppress(FinetuneError):
        catalog.resolve(recipe, [pair])
        return None
    return Space(key, choices=tuple(dict.fromkeys(choices)))


class Sweep:
    """The trials of a sweep, which optuna records in the folder of the sweep.

    Args:
        root: folder of the sweep.
        best: `evaluation.best` of the recipe, the criterion of trials as well.
        prune_after: finished trials after which one that is worse than their median at the same
            part of the run is stopped; 0 never stops one.

    Raises:
        FinetuneError: optuna is not installed, or its record cannot be read.
    """

    def __init__(
        self, root: Path, spaces: Sequence[Space], seed: int, best: str, prune_after: int
    ) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise FinetuneError(f"finetune sweep needs optuna: {install('sweep')}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.root, self.spaces, self.seed, self.best = root, tuple(spaces), seed, best
        pruner = optuna.pruners.MedianPruner(prune_after) if prune_after else None
        root.mkdir(parents=True, exist_ok=True)
        with reading(f"{root / RECORD}: cannot be read by optuna"):
            self.study = optuna.create_study(
                storage=f"sqlite:///{(root / RECORD).resolve()}", study_name="sweep",
                pruner=pruner or optuna.pruners.NopPruner(), load_if_exists=True,
            )  # fmt: skip

    def run(self, number: int) -> Run:
        """The run of a trial."""
        return Run(self.root / f"trial-{number:03d}")

    def trials(self, count: int) -> Iterator[tuple["Trial", list[str]]]:
        """Each trial to train until `count` are finished, and its overrides.

        One that was interrupted comes first. If all spaces are choices and `count` covers their
        combinations, each is trained once; otherwise values depend on the seed and the results.
        """
        import optuna

        combinations = math.prod(len(space.choices) for space in self.spaces)
        if 0 < combinations <= count:
            count = combinations
            for words in itertools.product(*(space.choices for space in self.spaces)):
                values = {space.key: word for space, word in zip(self.spaces, words, strict=True)}
                self.study.enqueue_trial(values, skip_if_exists=True)
        while True:
            if found := self._in_state("RUNNING"):
                trial = optuna.Trial(self.study, found[0]._trial_id)
            elif len(self.study.trials) < count or self._in_state("WAITING"):
                seed = self.seed + len(self.study.trials)
                self.study.sampler = optuna.samplers.TPESampler(seed=seed)
                trial = self.study.ask()
            else:
                return
            yield trial, [f"{space.key}={space.suggest(trial)}" for space in self.spaces]

    def train(self, trial: "Trial", launch: Callable[[], object]) -> str | None:
        """Train a trial and record its result; returns why it failed, or None.

        Raises:
            Interrupted: stopped by a signal; it is the first of `trials` again.
        """
        watch = _Watch(self, trial)
        try:
            with watch:
                launch()
        except Interrupted:
            if not watch.stopped:
                raise
            self.study.tell(trial, state=self.states["PRUNED"])
            return None
        except FinetuneError as error:
            return self._failed(trial, error.problems[0])
        values = [value for _, value in self.judged(trial.number)]
        if not values:
            return self._failed(trial, "no evaluation is a finite number")
        self.study.tell(trial, min(values))
        return None

    def judged(self, number: int) -> Iterator[tuple[float, float]]:
        """Each finite evaluation of a trial: part of the run, and value (lower is better)."""
        run, steps = self.run(number), 1
        for record in run.read_metrics():
            if record["kind"] == "start":
                steps = max(1, record["steps"])
            elif record["kind"] == "eval":
                found = parse(run, record)
                assert isinstance(found, Evaluated)
                value = judged_by(self.best, found.loss, found.metrics)
                if math.isfinite(value):
                    yield found.step / steps, value

    def table(self) -> Table:
        """All trials, the best first."""
        rows = list[list[str]]()
        for each in self._ranked():
            given = [each.params.get(space.key, comparison.ABSENT) for space in self.spaces]
            values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in given]
            problem = each.user_attrs.get("problem")
            state = f"failed: {problem}" if problem else STATES[each.state.name]
            rows.append([self.run(each.number).root.name, *values, self._result(each), state])
        keys = [space.key for space in self.spaces]
        return Table(rows, ["", *keys, self.best.removeprefix("-"), "state"], "Trials")

    def write_page(self) -> Path:
        """Write the page of the sweep: all trials, and a comparison of the best."""
        runs = [self.run(each.number) for each in self._ranked() if each.values]
        found = comparison.of_runs(runs[: comparison.MOST])
        page = comparison.page({**found, "tables": [self.table(), *found["tables"]]})
        write_whole(self.root / "index.html", page)
        return self.root / "index.html"

    def words(self) -> list[str]:
        """The table, and the best trial, as lines of text."""
        table = self.table()
        lines = aligned([["Trials", *table.columns[1:]], *table.rows])
        if done := self._in_state("COMPLETE"):
            best = min(done, key=lambda each: each.value)
            lines.append(f"best         {self.run(best.number).root}: {self._result(best)}")
        return lines

    def _failed(self, trial: "Trial", problem: str) -> str:
        trial.set_user_attr("problem", problem)
        self.study.tell(trial, state=self.states["FAIL"])
        return problem

    def _in_state(self, name: str) -> "list[FrozenTrial]":
        return self.study.get_trials(deepcopy=False, states=(self.states[name],))

    def _ranked(self) -> "list[FrozenTrial]":
        """Trials that began, those with the best result first."""
        begun = [each for each in self.study.trials if each.state.name != "WAITING"]
        return sorted(begun, key=lambda each: (each.values or [math.inf])[0])

    def _result(self, trial: "FrozenTrial") -> str:
        if not trial.values:
            return comparison.ABSENT
        larger = self.best != "loss" and not self.best.startswith("-")
        return units.loss(-trial.values[0] if larger else trial.values[0])


class _Watch:
    """Reports the evaluations of a trial to optuna while it trains, and stops a bad one.

    It is stopped by SIGTERM to this process, which the launcher forwards: the run saves and ends.
    """

    def __init__(self, sweep: Sweep, trial: "Trial") -> None:
        self.sweep, self.trial, self.stopped = sweep, trial, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="trial")

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """SIGTERM while the launcher does not handle it: before and after its processes run."""
        if not self.stopped:
            raise Interrupted("interrupted by SIGTERM between trainings: nothing to save")

    def _follow(self) -> None:
        reported = len(self.sweep.study.trials[self.trial.number].intermediate_values)
        pause = SECONDS_BETWEEN_LOOKS
        while not self._ended.wait(pause):
            began = time.monotonic()
            new = list(self.sweep.judged(self.trial.number))[reported:]
            for part, value in new:
                self.trial.report(value, round(1000 * part))
            reported += len(new)
            if new and new[-1][0] < 1 and self.trial.should_prune():
                self.stopped = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            # The records of a long run are many: reading them takes a tenth of the time at most.
            pause = max(SECONDS_BETWEEN_LOOKS, 10 * (time.monotonic() - began))
