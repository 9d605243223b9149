"""Contenders side by side, each a process of its own that takes one step when it is told.

What else the machine does falls on all of them alike, step by step.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.record import ROOT

Answer = dict[str, Any]


class Lost(Exception):
    """A contender ended before its last step; the message is the last line that it wrote."""


@dataclasses.dataclass
class Contender:
    """A process that has loaded everything and waits for its turn."""

    name: str
    process: subprocess.Popen[str]
    errors: Path

    @classmethod
    def start(cls, name: str, command: Sequence[str], folder: Path, environment: Any) -> Self:
        errors = folder / f"{name}.err"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        return cls(name, process, errors)

    def ask(self) -> Answer:
        """Let it take a step."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: `hear` says what it left
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Answer:
        """Its next answer.

        Raises:
            Lost: there will be none.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            status = self.process.returncode
            if status is not None and status < 0:  # by the system, say, where memory is short
                raise Lost(f"killed by signal {-status}")
            said = [each for each in self.errors.read_text().splitlines() if each.strip()]
            raise Lost(said[-1] if said else f"status {status}")
        return json.loads(line)

    def end(self) -> None:
        """Close its input, which ends it; end it where that does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def race(
    commands: dict[str, list[str]],
    folder: Path,
    threads: int,
    gpu: bool,
    rounds: range,
    minutes: float = float("inf"),
) -> tuple[dict[str, list[Answer]], dict[str, str]]:
    """Every contender's answer of every round, and why those that are missing were lost.

    They load one after the other, then take turns: round 0 of each, round 1 of each, ... There are
    `rounds.stop` of them, or once `minutes` are over at least `rounds.start`.
    """
    deadline = time.monotonic() + 60 * minutes
    answers: dict[str, list[Answer]] = {}
    lost: dict[str, str] = {}
    with contextlib.ExitStack() as held:
        racing: list[Contender] = []
        for name, command in commands.items():
            contender = Contender.start(name, command, folder, _environment(threads, gpu))
            held.callback(contender.end)
            with _noted(name, lost):
                contender.hear()  # that it is ready
                racing.append(contender)
        for number in range(rounds.stop):
            if number >= rounds.start and time.monotonic() > deadline:
                break
            for contender in [each for each in racing if each.name not in lost]:
                with _noted(contender.name, lost):
                    answers.setdefault(contender.name, []).append(contender.ask())
                    told = answers[contender.name][-1]
                    print(
                        f"round {number}, {contender.name}: {told['seconds']:.1f} s, "
                        f"{told['cpu_seconds']:.1f} CPU s",
                        flush=True,
                    )
    return {name: each for name, each in answers.items() if name not in lost}, lost


@contextlib.contextmanager
def _noted(name: str, lost: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Lost as error:
        lost[name] = str(error)
        print(f"{name} is lost: {error}", flush=True)


def _environment(threads: int, gpu: bool) -> dict[str, str]:
    """One number of threads for all, no network, no GPU where none is measured."""
    made = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, of versions that its own package allows
    }
    return made if gpu else made | {"CUDA_VISIBLE_DEVICES": ""}
