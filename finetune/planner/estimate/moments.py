"""Memory timeline of a step: moments with the bytes in use, by component."""

import dataclasses
from collections.abc import Mapping

OUTSIDE = ("loading", "reference pass", "sampling", "saving")
"""Moments outside of the passes and the update of a step."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """One moment of a step, with bytes by component."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The moments of a step in order."""

    moments: tuple[Moment, ...]

    @property
    def training(self) -> "Timeline":
        """The moments whose memory a run measures in its second step."""
        return Timeline(tuple(each for each in self.moments if each.name not in OUTSIDE))

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)
