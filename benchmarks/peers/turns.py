"""The contender's side of a race: wait for a line, take a step, and answer with a line.

    driver      step                      step
    contender          {"seconds": ...}          {"seconds": ...}

This runs in a peer's environment, so it must not import the toolkit.
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
    """A process that takes one step per line of input."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of libraries is not an answer
        self.seen: list[dict[str, torch.Tensor]] = []
        self.begun = self.spent = 0.0

    def ready(self) -> None:
        """Report that everything is loaded; the next line starts the first step."""
        self._say({"ready": True})

    def wait(self) -> None:
        """Wait for the next line and start the clocks; at the end of input the process exits."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.begun, self.spent = time.perf_counter(), cpu_seconds()

    def answer(self, loss: float | None, metrics: Mapping[str, float] | None = None) -> None:
        """Stop the clocks, and report the time and the measurements of the step."""
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
        """Record the result of `read` for the arguments of each forward pass of a model."""

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
    """Ids and labels of each document of a forward pass, without padding.

    Args:
        ids: (rows, length); each row is one document, or several concatenated documents.
        labels: Same shape, -100 for untrained tokens.
        mask: Same shape, 0 for padding; None without padding.
        positions: Same shape, 0 at the start of each document.
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
    """A hash that identifies a document."""
    pair = np.array([ids, labels], dtype=np.int64)
    pair[1, 0] = UNTRAINED  # the first token is never predicted, regardless of its label
    return hashlib.sha256(pair.tobytes()).hexdigest()[:16]


def cpu_seconds() -> float:
    """CPU time of this process and of all processes it started, such as compilers."""
    own = os.times()
    living = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(own[:4]) + sum(each.user + each.system for each in living)


def peak_bytes() -> int:
    """Peak memory: allocated on the GPU if there is one, otherwise the resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the parent's peak
        (found,) = re.findall(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        return int(found) << 10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
