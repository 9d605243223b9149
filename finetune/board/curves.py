"""The curves of a run for a screen: minimum, mean and maximum of each bucket of steps.

A file of a million steps is read once, by offset, and takes as much memory as one of two thousand.
"""

import contextlib
import math
import operator
import time
from array import array
from typing import Any

from pydantic_core import from_json

from finetune.runs.progress import Appended
from finetune.runs.run import Run

MOST = 2048
"""Buckets at which neighbours are merged."""
PLAIN = (
    "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory", "data_seconds",
    "router_aux_loss",
)  # fmt: skip
"""Numbers of a step that have a curve, besides the method's own metrics."""
MOST_NAMES = 64
SECONDS = 0.25
"""Seconds of one call of `read`, after which it returns with what it has."""
STEP_LINE = b'{"kind": "train"'


class _Curve:
    """Minimum, maximum, sum and count of each bucket."""

    def __init__(self, buckets: int) -> None:
        self.low = array("d", [math.inf]) * buckets
        self.high = array("d", [-math.inf]) * buckets
        self.total = array("d", [0.0]) * buckets
        self.count = array("q", [0]) * buckets

    def extend(self) -> None:
        self.low.append(math.inf)
        self.high.append(-math.inf)
        self.total.append(0.0)
        self.count.append(0)

    def add(self, at: int, values: list[Any]) -> None:
        """Add values to a bucket; what is no number is passed over."""
        try:
            low, high, total = float(min(values)), float(max(values)), float(sum(values))
        except (TypeError, OverflowError):
            values = [value for value in values if _is_number(value)]
            if not values:
                return
            low, high, total = float(min(values)), float(max(values)), float(sum(values))
        self.low[at] = min(self.low[at], low)
        self.high[at] = max(self.high[at], high)
        self.total[at] += total
        self.count[at] += len(values)

    def halve(self) -> None:
        self.low = array("d", map(min, self.low[::2], self.low[1::2]))
        self.high = array("d", map(max, self.high[::2], self.high[1::2]))
        self.total = array("d", map(operator.add, self.total[::2], self.total[1::2]))
        self.count = array("q", map(operator.add, self.count[::2], self.count[1::2]))


class Curves:
    """The curves of one run, kept up to date by `read`."""

    def __init__(self, run: Run) -> None:
        self._appended = Appended(run.metrics)
        self._reset()

    def _reset(self) -> None:
        self.width = 1
        """Steps of a bucket."""
        self.rows = 0
        self.steps = array("d")
        """Last step of each bucket."""
        self.hours = array("d")
        """Hours of training until the end of each bucket."""
        self.tokens = array("d")
        """Tokens until the end of each bucket, without padding."""
        self.curves: dict[str, _Curve] = {}
        self._sums = {"seconds": 0.0, "real_tokens": 0.0}

    def read(self) -> bool:
        """Read what is new, for `SECONDS` at most; returns whether the end was reached."""
        until = time.monotonic() + SECONDS
        for again, block in self._appended.blocks():
            if again:
                self._reset()
            self._take(_steps_of(block))
            if time.monotonic() > until:
                return False
        return True

    def _take(self, records: list[dict[str, Any]]) -> None:
        while records:
            at = self.rows // self.width
            if at == MOST:
                self._halve()
                continue
            here, records = _split(records, (at + 1) * self.width - self.rows)
            self.rows += len(here)
            if at == len(self.steps):
                for places in (self.steps, self.hours, self.tokens):
                    places.append(0.0)
                for curve in self.curves.values():
                    curve.extend()
            step = here[-1].get("step")
            self.steps[at] = float(step) if _is_number(step) else float(self.rows)
            for name in self._sums:
                known = (record.get(name) for record in here)
                self._sums[name] += float(sum(value for value in known if _is_number(value)))
            self.hours[at] = self._sums["seconds"] / 3600
            self.tokens[at] = self._sums["real_tokens"]
            for name in PLAIN:
                self._add(name, at, [record.get(name) for record in here])
            own = [record["metrics"] for record in here if isinstance(record.get("metrics"), dict)]
            for name in own[0] if own else ():
                self._add(name, at, [metrics.get(name) for metrics in own])

    def _add(self, name: str, at: int, values: list[Any]) -> None:
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) == MOST_NAMES or not any(map(_is_number, values)):
                return
            curve = self.curves[name] = _Curve(len(self.steps))
        curve.add(at, values)

    def _halve(self) -> None:
        self.width *= 2
        self.steps, self.hours, self.tokens = self.steps[1::2], self.hours[1::2], self.tokens[1::2]
        for curve in self.curves.values():
            curve.halve()

    def values(self, since: int = 0) -> dict[str, Any]:
        """The buckets from number `since` on, as lists for JSON, in which null is no number."""
        return {
            "width": self.width,
            "rows": self.rows,
            "since": since,
            "step": list(map(int, self.steps[since:])),
            "hours": [_short(value) for value in self.hours[since:]],
            "tokens": list(map(int, self.tokens[since:])),
            "curves": {
                name: {
                    "low": [_short(value) for value in curve.low[since:]],
                    "mean": [
                        _short(total / count) if count else None
                        for total, count in zip(
                            curve.total[since:], curve.count[since:], strict=True
                        )
                    ],
                    "high": [_short(value) for value in curve.high[since:]],
                }
                for name, curve in self.curves.items()
            },
        }


def _short(value: float) -> float | None:
    """A number with six digits, which is more than a screen shows; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def _split(records: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return records[:count], records[count:]


def _steps_of(block: bytes) -> list[dict[str, Any]]:
    """The steps in a block of lines; damaged lines are passed over."""
    lines = [line for line in block.split(b"\n") if line.startswith(STEP_LINE)]
    try:
        return from_json(b"[" + b",".join(lines) + b"]")  # at once, which is twice as fast
    except ValueError:
        found = list[dict[str, Any]]()
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(from_json(line))
        return found
