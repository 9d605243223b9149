"""Measures as sums over rows, with 95 % intervals of values and of paired differences."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Z = 1.959964
"""Standard deviations around the mean of a normal distribution that contain 95 % of it."""
RESAMPLES = 1_000
AT_ONCE = 4_000_000
"""Maximum number of weights of resampled rows in memory."""

Value = Callable[[np.ndarray], np.ndarray]
"""(..., sums) -> (...): the value computed from summed statistics."""
Interval = tuple[float, float]


def mean(sums: np.ndarray) -> np.ndarray:
    """The first sum divided by the second."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A value over a set of rows."""

    name: str
    sums: np.ndarray  # (rows, k) fp64: statistics of each row
    value: Value = mean
    better: Literal["higher", "lower", ""] = "higher"
    unit: Literal["share", "points", "nats", "", "tokens"] = "share"
    """`share`: from 0 to 1, shown in percent; `points`: from 0 to 100; `nats`: nats per token."""
    binary: bool = False
    """Whether every row is either right or wrong."""
    detail: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Further results as JSON, such as a confusion matrix or a signature."""
    scores: np.ndarray | None = None  # (rows,)
    """Score of each row, if it differs from the value computed on that row."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.sums)

    @property
    def total(self) -> float:
        """The value over all rows."""
        return float(self.value(self.sums.sum(0)))

    @property
    def of_rows(self) -> np.ndarray:
        """The score of each row.  # (rows,)"""
        return self.value(self.sums) if self.scores is None else self.scores

    def interval(self) -> Interval | None:
        """The 95 % interval: Wilson (1927) for binary rows, bootstrap percentiles for others.

        None for fewer than two rows.
        """
        if self.rows < 2:
            return None
        if self.binary:
            return wilson(float(self.sums[:, 0].sum()), float(self.sums[:, 1].sum()))
        return _percentiles(resampled(self.sums, self.value))


def of_scores(name: str, scores: Any, **fields: Any) -> Measure:
    """The mean of one score per row."""
    column = np.asarray(scores, dtype=np.float64)
    return Measure(name, np.stack([column, np.ones_like(column)], axis=1), **fields)


def difference(after: Measure, before: Measure) -> tuple[float, Interval | None]:
    """`after` minus `before` on the same rows, with the paired 95 % interval.

    Binary rows use the interval of Bonett and Price (2012), which does not collapse to a point if
    all changes have the same direction. Other rows use a bootstrap over pairs.
    """
    value = after.total - before.total
    if after.rows < 2:
        return value, None
    if after.binary:
        return value, paired(after.sums[:, 0], before.sums[:, 0])
    both = np.concatenate([after.sums, before.sums], axis=1)
    width = after.sums.shape[1]
    found = resampled(both, lambda s: after.value(s[..., :width]) - before.value(s[..., width:]))
    return value, _percentiles(found)


def wilson(right: float, rows: float) -> Interval:
    """Wilson's score interval of a proportion."""
    share, spread = right / rows, Z * Z / rows
    middle = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def paired(after: np.ndarray, before: np.ndarray) -> Interval:
    """The interval of a difference of proportions, with one change added in each direction."""
    rows = len(after) + 2
    gained = (float((after > before).sum()) + 1) / rows
    lost = (float((after < before).sum()) + 1) / rows
    change = gained - lost
    reach = Z * math.sqrt((gained + lost - change * change) / rows)
    return max(-1.0, change - reach), min(1.0, change + reach)


def rows_needed(bound: float) -> int:
    """Number of rows, all of them right, for which Wilson's interval is above a bound."""
    return math.ceil(Z * Z * bound / (1 - bound))


def resampled(sums: np.ndarray, value: Value) -> np.ndarray:
    """Values of `RESAMPLES` bootstrap samples of the rows, from a fixed seed.  # (RESAMPLES,)"""
    rows, rng = len(sums), np.random.default_rng(0)
    found: list[np.ndarray] = []
    at_once = max(1, AT_ONCE // rows)
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        weights = rng.multinomial(rows, np.full(rows, 1 / rows), size=count)  # (count, rows)
        found.append(value(weights @ sums))
    return np.concatenate(found)


def _percentiles(values: np.ndarray) -> Interval | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [2.5, 97.5])
    return float(low), float(high)
