"""A contender's end of the race: it waits for a line, takes a step, and answers with a line.

    driver      step                      step
    contender          {"seconds": ...}          {"seconds": ...}

It runs in a peer's own environment: nothing here imports the toolkit.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

UNTRAINED = -100


class Turns:
    """One process that steps when it is told."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not be taken for an answer
        self.seen: list[dict[str, torch.Tensor]] = []
        self.begun = self.spent = 0.0

    def ready(self) -> None:
        """Say that all is loaded; the next line is the first step's."""
        self._say({"ready": True})

    def wait(self) -> None:
        """Wait for the next line and start the clocks; without one, this process ends."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.begun, self.spent = time.perf_counter(), cpu_seconds()

    def answer(self, loss: float | None, metrics: Mapping[str, float] | None = None) -> None:
        """Stop the clocks and say what the step took, and what was measured in it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, total = time.perf_counter() - self.begun, cpu_seconds()
        found = [document for call in self.seen for document in documents(**call)]
        self.seen.clear()
        self._say(
            {
                "seconds": seconds,
                "cpu_seconds": total - self.spent,
                "cpu_seconds_since_start": total,
                "seconds_since_start": time.time() - psutil.Process().create_time(),
                "peak_bytes": peak_bytes(),
                "loss": loss,
                "metrics": dict(metrics or {}),
                "documents": sorted(digest(ids, labels) for ids, labels in found),
            }
        )

    def watch(self, model: torch.nn.Module, read: Callable[..., dict[str, Any]]) -> None:
        """Keep what `read` makes of the arguments of each forward pass of a model."""

        def keep(_: torch.nn.Module, words: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.seen.append(read(*words, **named))

        model.register_forward_pre_hook(keep, with_kwargs=True)

    def _say(self, answer: dict[str, Any]) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def documents(
    ids: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and labels of each document of a forward pass, padding left out.

    Args:
        ids: (rows, length); rows of one document each, or documents end to end.
        labels: As `ids`, -100 where nothing is trained.
        mask: As `ids`, 0 where a row is padded; None where nothing is.
        positions: As `ids`, 0 where a document begins.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for row in range(len(ids)):
        real = torch.ones_like(ids[row]) if mask is None else mask[row]
        tokens, trained = (each[row][real != 0].cpu().numpy() for each in (ids, labels))
        starts = (
            np.empty(0, int) if positions is None else np.flatnonzero(positions[row].cpu() == 0)
        )
        cuts = [start for start in starts.tolist() if start]
        found += zip(np.split(tokens, cuts), np.split(trained, cuts), strict=True)
    return found


def digest(ids: np.ndarray | list[int], labels: np.ndarray | list[int]) -> str:
    """A name for a document that no other has."""
    pair = np.array([ids, labels], dtype=np.int64)
    pair[1, 0] = UNTRAINED  # the first token is predicted from nothing, whatever its label
    return hashlib.sha256(pair.tobytes()).hexdigest()[:16]


def cpu_seconds() -> float:
    """CPU time of this process and of every process it started: compilers run in those."""
    own = os.times()
    living = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(own[:4]) + sum(each.user + each.system for each in living)


def peak_bytes() -> int:
    """The most memory that was held: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would begin with what the parent held
        (found,) = re.findall(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        return int(found) << 10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
