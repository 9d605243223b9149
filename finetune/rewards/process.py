"""Run reward functions in a separate process, with a time limit for each call.

A function that hangs is killed with its process and the programs that it started, without stopping
the heartbeat of a rank. Messages are lines of JSON: a request has a number, the index of the reward
and its arguments; an answer has the number of its request and the scores.
"""

import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from finetune.errors import FinetuneError, TrainingFailure
from finetune.process import interpreter
from finetune.process.signals import end_group, name_of
from finetune.rewards import Reward

QUOTED = 300
"""Maximum characters of a prompt or a completion in a message."""

Scores = list[float | None]
Columns = Mapping[str, Sequence[Any]]
"""Lists with a value per completion: `prompts`, `completions`, and the columns of the data."""


class RewardFailure(TrainingFailure):
    """A reward function failed; the model's weights are not affected."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The problem with a call, and the index of the completion that caused it, if known."""

    problem: str
    index: int | None = None


class RewardProcess:
    """Scores completions; its process starts at the first call, and again after a hang.

    Args:
        rewards: Rewards, whose functions exist and accept the columns.
        timeout: Maximum seconds of a call.
    """

    def __init__(self, rewards: Sequence[Reward], timeout: float) -> None:
        self.rewards, self.timeout = tuple(rewards), timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._imported = False
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._numbers = itertools.count()

    def score(self, columns: Columns, skip: bool = False) -> tuple[list[Scores], list[str]]:
        """Score every completion by each reward; returns the scores, and failures that it skipped.

        Args:
            columns: Arguments, with a value per completion.
            skip: Leave completions whose reward fails without a score instead of raising.

        Raises:
            RewardFailure: a reward fails; the message has the prompt and the completion.
        """
        scores: list[Scores] = []
        notes: list[str] = []
        for number, reward in enumerate(self.rewards):
            found = self._call(number, columns)
            if isinstance(found, Failure):
                problem = self._failure_text(reward, self._blamed(number, columns, found), columns)
                if not skip:
                    raise RewardFailure(
                        f"{problem}; fix the function, or set on_reward_error=skip to leave "
                        "completions without a score"
                    )
                notes.append(problem)
                found = self._one_by_one(number, columns, found)
            scores.append(found)
        return scores, notes

    def close(self) -> None:
        """End the process, and the programs that it started."""
        if self._process is not None:
            end_group(self._process)
            self._process = None

    def _call(self, number: int, columns: Columns) -> Scores | Failure:
        count = len(columns["completions"])
        answer = self._ask({"reward": number, "columns": columns}, self.timeout)
        if answer is None:
            return Failure(f"takes more than reward_timeout={self.timeout:g} s")
        if "problem" in answer:
            return Failure(answer["problem"])
        scores = answer["scores"]
        if not isinstance(scores, list):
            return Failure(f"returns {scores}, expected a list of {count} numbers")
        if len(scores) != count:
            return Failure(f"returns {len(scores)} numbers for {count} completions")
        for index, score in enumerate(scores):
            if isinstance(score, str):
                return Failure(f"returns {score}, expected a finite number or None", index)
        return scores

    def _blamed(self, number: int, columns: Columns, failure: Failure) -> Failure:
        """The failure with the index of the first completion that fails on its own.

        Without an index if none does, or the search takes longer than the time limit of a call.
        """
        if failure.index is not None:
            return failure
        self._started()
        until = time.monotonic() + self.timeout
        for index in range(len(columns["completions"])):
            if time.monotonic() > until:
                break
            alone = self._call(number, _one(columns, index))
            if isinstance(alone, Failure):
                return Failure(failure.problem, index)
        return failure

    def _one_by_one(self, number: int, columns: Columns, failure: Failure) -> Scores:
        """Score completions one by one; none after a timeout, because that could take hours."""
        count = len(columns["completions"])
        if "reward_timeout" in failure.problem:
            return [None] * count
        found = [self._call(number, _one(columns, index)) for index in range(count)]
        return [None if isinstance(each, Failure) else each[0] for each in found]

    def _failure_text(self, reward: Reward, failure: Failure, columns: Columns) -> str:
        index = failure.index or 0
        which = "prompt" if failure.index is not None else "all together, the first: prompt"
        prompt, completion = columns["prompts"][index], columns["completions"][index]
        return (
            f"reward '{reward.function}' {failure.problem} ({which} {_quoted(prompt)}, completion "
            f"{_quoted(completion)})"
        )

    def _ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any] | None:
        """Send a request and return its answer; None after a timeout."""
        process, number = self._started(), next(self._numbers)
        until = None if seconds is None else time.monotonic() + seconds
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**request, "number": number}).encode() + b"\n")
            process.stdin.flush()
            while line := self._answers.get(timeout=until and max(0.0, until - time.monotonic())):
                answer = json.loads(line)
                if answer["number"] == number:
                    return answer
        except queue.Empty:
            self.close()
            return None
        except BrokenPipeError:
            pass
        problem = _end_of(process.wait())
        self.close()
        return {"problem": problem}

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, started if needed, after it has imported every function.

        It is in a session of its own, so that Ctrl-C in a terminal reaches the training alone.

        Raises:
            FinetuneError: the imports failed; RewardFailure if they succeeded before.
        """
        if self._process is not None:
            return self._process
        code = f"import sys; sys.path[:] = {sys.path!r}; from finetune.rewards.server import serve"
        self._process = subprocess.Popen(
            interpreter.python("-c", f"{code}; serve()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        reader.start()
        fields = [dataclasses.asdict(reward) for reward in self.rewards]
        answer = self._ask({"rewards": fields, "parent": os.getpid()})
        assert answer is not None  # imports and models take the time that they need
        if "problem" in answer:
            self.close()
            problem = answer["problem"]
            if not problem.startswith("reward_funcs: "):
                names = ", ".join(f"'{reward.function}'" for reward in self.rewards)
                problem = f"reward_funcs: importing {names} {problem}"
            kind = RewardFailure if self._imported else FinetuneError
            raise kind(problem)
        self._imported = True
        return self._process


def _end_of(status: int) -> str:
    """Description of how a process ended, from its exit status, negative for a signal."""
    if status >= 0:
        return f"ended its process with status {status}"
    memory = ", as when memory runs out" if status == -signal.SIGKILL else ""
    return f"had its process killed by {name_of(-status)}{memory}"


def _read(file: IO[bytes], answers: "queue.Queue[bytes]") -> None:
    """Pass on lines, and an empty line at the end of the file."""
    for line in file:
        answers.put(line)
    answers.put(b"")


def _one(columns: Columns, index: int) -> dict[str, list[Any]]:
    return {name: [values[index]] for name, values in columns.items()}


def _quoted(value: Any) -> str:
    """The beginning of a text, or of the last message of a conversation, in quotation marks."""
    text = value if isinstance(value, str) else str(value[-1]["content"])
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}...")
