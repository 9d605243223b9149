"""Draw curves over the steps of a run as SVG, with the colors of a page's style sheet.

height ^  ticks at 1, 2 or 5 times a power of ten
       |  raw     every value, or the minimum and maximum of each bucket of steps
       |  smooth  mean over a window around each step
       +----------------> step
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from markupsafe import Markup, escape

Point = tuple[float, float]
"""(step, value)"""

WIDTHS = {"wide": (940, 330), "small": (460, 210)}
"""Width and height of a drawing, in SVG units."""
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 58, 24, 12, 30
BUCKETS = 400
"""Buckets of a curve, each with at most two points: the resolution of a screen."""
MANY = 40
"""Number of values from which a smoothed curve is shown as well."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line or one set of dots."""

    name: str
    points: Sequence[Point]
    look: Literal["raw", "smooth", "dots"]
    colour: int | None = None
    """Index of a color, to distinguish curves of the same look."""

    @property
    def kind(self) -> str:
        """CSS classes of the curve."""
        return self.look if self.colour is None else f"{self.look} colour-{self.colour}"


def finite(points: Sequence[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving average of the finite values, over a window of a twentieth of all points."""
    kept = finite(points)
    reach = len(kept) // 40
    sums = [0.0]
    for _, value in kept:
        sums.append(sums[-1] + value)
    smoothed = []
    for index, (step, _) in enumerate(kept):
        low, high = max(0, index - reach), min(len(kept), index + reach + 1)
        smoothed.append((step, (sums[high] - sums[low]) / (high - low)))
    return smoothed


def thin(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """At most two points per bucket, its minimum and maximum, so that no spike is lost."""
    if len(points) <= 2 * buckets:
        return list(points)
    thinned: list[Point] = []
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        thinned += sorted({low, high})
    return thinned


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    span = high - low
    power = 10 ** math.floor(math.log10(span / most))
    apart = next(m * power for m in (1, 2, 5, 10, 20) if span / (m * power) <= most - 1)
    first = math.ceil(low / apart - 1e-9)
    last = math.floor(high / apart + 1e-9)
    return [index * apart for index in range(first, last + 1)]


def draw(
    curves: Sequence[Curve],
    *,
    label: str,
    show: Callable[[float], str],
    size: Literal["wide", "small"] = "small",
    best: Point | None = None,
    from_zero: bool = False,
) -> Markup:
    """An `<svg>` of the curves; empty if no value is finite.

    `show` formats values at the axis and in tooltips; the point `best` is marked with a ring.
    """
    points = [point for curve in curves for point in finite(curve.points)]
    if not points:
        return Markup()
    frame = _frame(points, size, from_zero)
    parts = [*_axes(frame, show), *(_draw_curve(frame, curve, show) for curve in curves)]
    if best is not None:
        x, y = frame.place(best)
        parts.append(f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    body = "\n".join(parts)
    # Every part consists of numbers and of escaped text.
    return Markup(
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(label)}">\n{body}\n</svg>'
    )


@dataclasses.dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    steps: Point
    values: Point

    def place(self, point: Point) -> Point:
        across = (point[0] - self.steps[0]) / (self.steps[1] - self.steps[0])
        up = (point[1] - self.values[0]) / (self.values[1] - self.values[0])
        x = MARGIN_LEFT + across * (self.width - MARGIN_LEFT - MARGIN_RIGHT)
        y = self.height - MARGIN_BOTTOM - up * (self.height - MARGIN_TOP - MARGIN_BOTTOM)
        return x, y


def _frame(points: Sequence[Point], size: str, from_zero: bool) -> _Frame:
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = min(0.0, low) if from_zero else low
    constant = abs(high) / 2 or 1.0  # padding that centers a constant curve
    pad = 0.05 * (high - low) if high > low else constant
    bottom = low if low == 0 and (high == 0 or from_zero) else low - pad
    width, height = WIDTHS[size]
    last = last if last > first else first + 1
    return _Frame(width, height, (first, last), (bottom, high + pad))


def _axes(frame: _Frame, show: Callable[[float], str]) -> list[str]:
    parts = []
    right, bottom = frame.width - MARGIN_RIGHT, frame.height - MARGIN_BOTTOM
    for value in ticks(*frame.values, most=6):
        _, y = frame.place((frame.steps[0], value))
        parts.append(
            f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        text = escape(show(value))
        parts.append(f'<text class="value" x="{MARGIN_LEFT - 8}" y="{y + 4:.1f}">{text}</text>')
    steps = [step for step in ticks(*frame.steps, most=frame.width // 80) if step == round(step)]
    for step in steps:
        x, _ = frame.place((step, frame.values[0]))
        parts.append(f'<text class="step" x="{x:.1f}" y="{bottom + 20}">{step:,.0f}</text>')
    parts.append(f'<text class="value" x="{MARGIN_LEFT - 22}" y="{bottom + 20}">step</text>')
    parts.append(
        f'<line class="axis" x1="{MARGIN_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    )
    return parts


def _draw_curve(frame: _Frame, curve: Curve, show: Callable[[float], str]) -> str:
    points = finite(curve.points)
    places = [frame.place(point) for point in thin(points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline class="{curve.kind}" points="{path}"/>'
    if curve.look != "dots" and len(points) > 1:
        return line
    dots = [line] if curve.look == "dots" else []
    for (step, value), (x, y) in zip(points, map(frame.place, points), strict=True):
        tip = escape(f"{curve.name} at step {step:,.0f}: {show(value)}")
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
        dots.append(f'<circle class="{curve.kind}" {place}><title>{tip}</title></circle>')
    return "\n".join(dots)
