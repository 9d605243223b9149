"""What a proof found: its checks, their numbers, and the verdict."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from finetune.reports.proof_page import FORMAT
from finetune.runs.run import write_json

Name = Literal["realised", "equal", "packing", "resume", "end to end"]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Numbers behind a check: rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Check:
    """One question about one recipe on one backend, and its answer."""

    kind: str
    """What is trained: `own` (as the recipe says), `lora`, `qlora` or `full`."""
    backend: str
    name: Name
    passed: bool | None
    """None: not available here."""
    summary: str
    """What was measured against which tolerance, or what is wrong."""
    grid: Grid | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A pair that was not tried, with the reason."""

    kind: str
    backend: str
    reason: str
    missing: bool = False
    """This machine lacks what the backend needs; else the planner refuses the pair."""
    named: bool = False
    """The backend was asked for by its name: where something is missing, that is a failure."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest differences to one process that rounding explains."""

    loss: float
    """Of a step's loss, relative to it."""
    norm: float
    """Of a step's gradient norm, relative to it."""
    weights: float
    """Of the trained weights, relative to how far the second half of the steps moved them."""
    answers: float
    """Of the loss that plain transformers computes from the saved result, relative to it."""
    logits: float = 1e-4
    """Of merged and adapted logits in fp32, relative to the largest."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """A proof as `proof.json` holds it."""

    recipe: dict[str, Any]
    """The recipe as it was asked for, with its method."""
    notes: dict[str, tuple[str, ...]]
    """What the subject of each kind differs in from the recipe."""
    settings: dict[str, Any]
    tolerance: Tolerance
    checks: tuple[Check, ...]
    refused: tuple[Refused, ...]
    environment: dict[str, Any]
    seconds: float
    launches: int

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def proved(self) -> bool:
        """Nothing failed, nothing that was named is missing, and something was shown."""
        lacking = any(each.missing and each.named for each in self.refused)
        return not self.failures and not lacking and any(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The proof in a sentence."""
        pairs = len({(check.kind, check.backend) for check in self.checks})
        passed = sum(check.passed is True for check in self.checks)
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
