"""What a proof found: its checks, their numbers, and the verdict."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from finetune.record.proofs import FORMAT
from finetune.run import write_json

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
    """A pair that the planner refuses, with its reason."""

    kind: str
    backend: str
    reason: str


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
        """Nothing failed, and something was shown."""
        return not self.failures and any(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The proof in a sentence."""
        pairs = len({(check.kind, check.backend) for check in self.checks})
        passed = sum(check.passed is True for check in self.checks)
        refused = f"; {len(self.refused)} pairs are refused by the planner" if self.refused else ""
        if self.proved:
            return f"proved: {passed} checks of {pairs} pairs hold{refused}"
        failed = len(self.failures)
        return f"not proved: {failed} of {failed + passed} checks failed{refused}"


def write_proof(proof: Proof, path: Path) -> None:
    record = {"format": FORMAT, "proved": proof.proved, "verdict": proof.verdict}
    write_json(path, record | dataclasses.asdict(proof))
