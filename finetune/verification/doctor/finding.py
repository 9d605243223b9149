"""The answer to one question about a model."""

import dataclasses
from typing import Literal

Answer = Literal["yes", "no", "-"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question, its answer, and the reason."""

    name: str
    passed: bool | None
    """None: the question does not arise for this model, or an earlier `no` leaves it open."""
    why: str
    refused: bool = False
    """The no is a refusal in words of this project, with what to do instead."""

    @property
    def answer(self) -> Answer:
        """The answer as the table shows it."""
        if self.passed is None:
            return "-"
        return "yes" if self.passed else "no"
