"""The result of a proof: its checks, their numbers, and the verdict."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from finetune.reports.proof_page import FORMAT
from finetune.runs.run import write_json

Name = Literal["realised", "equal", "packing", "resume", "end to end"]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The numbers of a check: rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of one recipe on one backend, and its result."""

    kind: str
    """What is trained: `own` (the recipe unchanged), `lora`, `qlora` or `full`."""
    backend: str
    name: Name
    passed: bool
    summary: str
    """Measured values and tolerances, or what is wrong."""
    grid: Grid | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A pair that was not run, with the reason."""

    kind: str
    backend: str
    reason: str
    missing: bool = False
    """Whether this machine lacks something for the backend; otherwise the planner refuses it."""
    named: bool = False
    """Whether the backend was requested by name, so that something missing is a failure."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Maximum differences from one process that rounding explains."""

    loss: float
    """Relative difference of a step's loss."""
    norm: float
    """Relative difference of a step's gradient norm."""
    weights: float
    """Distance of the trained weights, relative to their change in the second half of the steps."""
    answers: float
    """Relative difference of the loss that plain transformers computes from the saved result."""
    strays: float = 1e-4
    """Share of a tensor's elements, at least one, that the distance of the weights leaves out."""
    logits: float = 1e-4
    """Difference of merged and adapted logits in fp32, relative to the largest logit."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Contents of `proof.json`."""

    recipe: dict[str, Any]
    """The requested recipe, with its method."""
    notes: dict[str, tuple[str, ...]]
    """Differences of each kind's subject from the recipe."""
    settings: dict[str, Any]
    tolerance: Tolerance
    checks: tuple[Check, ...]
    refused: tuple[Refused, ...]
    environment: dict[str, Any]
    seconds: float
    launches: int

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def proved(self) -> bool:
        """Whether at least one check passed, none failed, and no named backend was missing."""
        lacking = any(each.missing and each.named for each in self.refused)
        return not self.failures and not lacking and any(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        pairs = len({(check.kind, check.backend) for check in self.checks})
        passed = sum(check.passed for check in self.checks)
        rest = "".join(f"; {part}" for part in self._not_tried())
        if self.proved:
            return f"proved: {passed} checks of {pairs} pairs hold{rest}"
        failed = len(self.failures)
        return f"not proved: {failed} of {failed + passed} checks failed{rest}"

    def _not_tried(self) -> Iterator[str]:
        planner = sum(not each.missing for each in self.refused)
        if planner:
            yield f"{planner} pairs are refused by the planner"
        missing = [each.reason for each in self.refused if each.missing]
        for reason in dict.fromkeys(missing):
            yield f"{missing.count(reason)} pairs not proved, because {reason}"


def write_proof(proof: Proof, path: Path) -> None:
    record = {"format": FORMAT, "proved": proof.proved, "verdict": proof.verdict}
    write_json(path, record | dataclasses.asdict(proof))
