"""What a metric is, and which metrics fit some rows."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune import extensions
from finetune.errors import FinetuneError
from finetune.evaluation.answers import Answer
from finetune.evaluation.measures import Measure
from finetune.evaluation.metrics import METRICS
from finetune.evaluation.questions import Asked


@dataclasses.dataclass(frozen=True)
class Settings:
    """What metrics are given beside rows and answers."""

    run_code: bool = False
    """Whether code that a model wrote may be executed."""
    database: Path | None = None
    """SQLite file of queries, where rows name none."""
    schema: Path | None = None
    """JSON schema of answers, where rows have none."""


Row = tuple[Asked, Sequence[Answer]]
"""A row with its greedy answer, and behind it the answers that were drawn for pass@k."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """Compares answers with references."""

    about: str
    measures: tuple[str, ...]
    """Names of its numbers; the first one says which answers got better or worse."""
    refuse: Callable[[Asked, Settings], str | None]
    """Why a row does not fit; None where it does."""
    suits: Callable[[Sequence[Asked], Settings], bool]
    """Whether it is measured by itself, on rows that all fit."""
    measure: Callable[[Sequence[Row], Settings], list[Measure]]
    """The numbers; only the first answer of a row counts, except for code."""


def find(name: str) -> Metric:
    """A metric by its name, or by `module:attribute` of one outside the package.

    Raises:
        FinetuneError: there is none.
    """
    found = extensions.find("--metrics", name, METRICS)
    if not isinstance(found, Metric):
        raise FinetuneError(
            f"--metrics: '{name}' is not a finetune.evaluation.metrics.metric.Metric"
        )
    return found


def choose(names: Sequence[str], asked: Sequence[Asked], settings: Settings) -> dict[str, Metric]:
    """The named metrics, or without names those that suit the rows.

    Raises:
        FinetuneError: no such metric, or one that does not fit a row; with every problem.
    """
    chosen, problems = dict[str, Metric](), list[str]()
    for name in names or METRICS:
        try:
            metric = find(name)
        except FinetuneError as error:
            problems += error.problems
            continue
        misfit = _misfit(metric, asked, settings)
        if misfit is None and (names or metric.suits(asked, settings)):
            chosen[name] = metric
        elif misfit is not None and names:
            problems.append(f"--metrics {name}: {misfit}")
    if problems:
        raise FinetuneError(*problems)
    return chosen


def _misfit(metric: Metric, asked: Sequence[Asked], settings: Settings) -> str | None:
    """The first row that does not fit, and why."""
    for each in asked:
        problem = metric.refuse(each, settings)
        if problem is not None:
            return f"{each.place or 'a row'}: {problem}"
    return None


def needs_words(asked: Asked, settings: Settings) -> str | None:
    """Why a row has no reference in words."""
    if asked.expected:
        return None
    return "its answer calls a tool and says nothing" if asked.calls else "its answer is empty"
