"""The interface of a metric, and the selection of metrics for a set of rows."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune import extensions
from finetune.errors import FinetuneError, refuse
from finetune.evaluation.generations import Answer
from finetune.evaluation.measures import Measure
from finetune.evaluation.metrics import METRICS
from finetune.evaluation.questions import Asked


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of metrics."""

    run_code: bool = False
    """Whether code that a model wrote may be executed."""
    database: Path | None = None
    """SQLite file for queries of rows that do not name one."""
    schema: Path | None = None
    """JSON schema of answers to rows without one."""


Row = tuple[Asked, Sequence[Answer]]
"""A row with its greedy answer, followed by the answers that were sampled for pass@k."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """Compares answers with references."""

    about: str
    measures: tuple[str, ...]
    """Names of its measures; the first one decides which answers got better or worse."""
    refuse: Callable[[Asked, Settings], str | None]
    """Returns the reason why a row is not supported; None if it is."""
    suits: Callable[[Sequence[Asked], Settings], bool]
    """Whether to select the metric automatically, for rows that are all supported."""
    measure: Callable[[Sequence[Row], Settings], list[Measure]]
    """Computes the measures; only `code` uses more than the first answer of a row."""


def find(name: str) -> Metric:
    """A metric by name, or by `module:attribute` for one outside the package.

    Raises:
        FinetuneError: the metric does not exist.
    """
    found = extensions.find("--metrics", name, METRICS)
    if not isinstance(found, Metric):
        raise FinetuneError(
            f"--metrics: '{name}' is not a finetune.evaluation.metrics.metric.Metric"
        )
    return found


def choose(names: Sequence[str], asked: Sequence[Asked], settings: Settings) -> dict[str, Metric]:
    """The metrics with the given names; without names, all metrics that suit the rows.

    Raises:
        FinetuneError: a metric does not exist or does not support a row; the message lists all
            problems.
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
    refuse(problems)
    return chosen


def _misfit(metric: Metric, asked: Sequence[Asked], settings: Settings) -> str | None:
    """The first row that the metric does not support, with the reason."""
    for each in asked:
        problem = metric.refuse(each, settings)
        if problem is not None:
            return f"{each.place or 'a row'}: {problem}"
    return None


def needs_words(asked: Asked, settings: Settings) -> str | None:
    """Reason why a row has no text reference; None if it has one."""
    if asked.expected:
        return None
    return "its answer calls a tool and has no text" if asked.calls else "its answer is empty"
