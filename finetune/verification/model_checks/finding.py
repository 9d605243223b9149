"""The result of one check of a model."""

import dataclasses
from typing import Literal

Answer = Literal["yes", "no", "-"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check, its result, and the reason."""

    name: str
    passed: bool | None
    """None: the check does not apply to this model, or an earlier failure prevents it."""
    why: str
    refused: bool = False
    """Whether the failure is an error of this package, with what to do instead."""

    @property
    def answer(self) -> Answer:
        """The result as shown in the table."""
        if self.passed is None:
            return "-"
        return "yes" if self.passed else "no"
