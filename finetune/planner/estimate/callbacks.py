"""Types of the callbacks that the planner accepts: a trace of a plan, and a measured rate."""

from collections.abc import Callable
from typing import Any, Protocol

from finetune import backend as backends
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan


class Verification(Protocol):
    """Comparison of a traced plan with its prediction."""

    @property
    def agrees(self) -> bool: ...

    @property
    def traced_peak(self) -> float:
        """Traced peak in bytes per process."""
        ...

    def summary(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ...

    def page(self) -> str:
        """The comparison as text."""
        ...


Measure = Callable[[backends.Precision], float]
"""Measures the FLOP/s of matrix products on this machine's CPU, over all cores."""
Verify = Callable[[Plan, Workload | None], Verification]
"""Traces a plan and compares the trace with the predictions for a workload, if one is given."""
