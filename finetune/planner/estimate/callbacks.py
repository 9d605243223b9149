"""What the planner is given by those above it: a trace of a plan, and a measured rate."""

from collections.abc import Callable
from typing import Any, Protocol

from finetune import backend as backends
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan


class Verification(Protocol):
    """What was traced beside what is predicted."""

    @property
    def agrees(self) -> bool: ...

    @property
    def traced_peak(self) -> float:
        """Bytes per process."""
        ...

    def summary(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ...

    def page(self) -> str:
        """The same as text."""
        ...


Measure = Callable[[backends.Precision], float]
"""FLOP/s of matrix products on this machine's CPU, all cores together."""
Verify = Callable[[Plan, Workload | None], Verification]
"""Traces a plan and holds the workload's numbers against it; None where there are none."""
