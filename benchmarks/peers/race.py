"""Run contenders in separate processes, which take one step at a time in turn.

Other load on the machine therefore affects all of them equally.
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
    """A contender ended before its last step; the message is its last line of output."""


@dataclasses.dataclass
class Contender:
    """A process that has loaded its job and waits for its turn."""

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
        """Let the contender take a step; returns its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `hear` reports why
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Answer:
        """The next answer.

        Raises:
            Lost: the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            status = self.process.returncode
            if status is not None and status < 0:  # for example when out of memory
                raise Lost(f"killed by signal {-status}")
            said = [each for each in self.errors.read_text().splitlines() if each.strip()]
            raise Lost(said[-1] if said else f"status {status}")
        return json.loads(line)

    def end(self) -> None:
        """Close the input of the process, which ends it; kill it if it does not end."""
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
    """The answers of every contender by round, and the reasons why contenders were lost.

    They load one after the other, then take turns: round 0 of each, round 1 of each, ... There are
    `rounds.stop` rounds; after `minutes`, the race stops once it has `rounds.start` rounds.
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
                contender.hear()  # it is ready
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
    """Environment with the same number of threads for all, no network, and no GPU unless `gpu`."""
    made = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",  # of LLaMA-Factory, for versions that its package allows
    }
    return made if gpu else made | {"CUDA_VISIBLE_DEVICES": ""}
