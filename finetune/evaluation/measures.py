"""A measured number as sums over rows, with its 95 % interval, alone and as a paired difference."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Z = 1.959964
"""Standard deviations of a normal distribution that hold 95 % of it."""
RESAMPLES = 1_000
AT_ONCE = 4_000_000
"""Weights of resampled rows that are in memory at a time."""

Value = Callable[[np.ndarray], np.ndarray]
"""(..., sums) -> (...): the number that summed statistics make."""
Interval = tuple[float, float]


def mean(sums: np.ndarray) -> np.ndarray:
    """The first sum over the second."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1]


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number over some rows."""

    name: str
    sums: np.ndarray  # (rows, k) fp64: what each row adds
    value: Value = mean
    better: Literal["higher", "lower", ""] = "higher"
    unit: Literal["share", "points", "nats", "", "tokens"] = "share"
    """`share`: from 0 to 1, shown in per cent; `points`: from 0 to 100; `nats` for each token."""
    binary: bool = False
    """Whether every row is right or wrong."""
    detail: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """What else is known, as JSON: a confusion table, a signature."""
    scores: np.ndarray | None = None  # (rows,)
    """How good each row is, where that is not the number of the row alone."""

    @property
    def rows(self) -> int:
        """Rows that it is measured on."""
        return len(self.sums)

    @property
    def total(self) -> float:
        """The number over all rows."""
        return float(self.value(self.sums.sum(0)))

    @property
    def of_rows(self) -> np.ndarray:
        """The number of each row.  # (rows,)"""
        return self.value(self.sums) if self.scores is None else self.scores

    def interval(self) -> Interval | None:
        """95 %: Wilson's for rows that are right or wrong (Wilson 1927), else a bootstrap's.

        None for fewer than two rows.
        """
        if self.rows < 2:
            return None
        if self.binary:
            return wilson(float(self.sums[:, 0].sum()), float(self.sums[:, 1].sum()))
        return _percentiles(resampled(self.sums, self.value))


def of_scores(name: str, scores: Any, **fields: Any) -> Measure:
    """The mean of one number a row."""
    column = np.asarray(scores, dtype=np.float64)
    return Measure(name, np.stack([column, np.ones_like(column)], axis=1), **fields)


def difference(after: Measure, before: Measure) -> tuple[float, Interval | None]:
    """After less before on the same rows, and the paired 95 % interval.

    Of rows that are right or wrong: Bonett and Price (2012), which does not become a point where
    every row that changed went the same way. Of others: a bootstrap that draws rows in pairs.
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
    """The score interval of a share."""
    share, spread = right / rows, Z * Z / rows
    middle = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def paired(after: np.ndarray, before: np.ndarray) -> Interval:
    """The interval of a difference of shares, from rows that changed with one added to each way."""
    rows = len(after) + 2
    gained = (float((after > before).sum()) + 1) / rows
    lost = (float((after < before).sum()) + 1) / rows
    change = gained - lost
    reach = Z * math.sqrt((gained + lost - change * change) / rows)
    return max(-1.0, change - reach), min(1.0, change + reach)


def rows_needed(bound: float) -> int:
    """Rows that must all be right before Wilson's interval is above a bound."""
    return math.ceil(Z * Z * bound / (1 - bound))


def resampled(sums: np.ndarray, value: Value) -> np.ndarray:
    """The number of `RESAMPLES` draws of as many rows, with replacement; the same every time."""
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
