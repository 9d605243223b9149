"""Schedule requests with continuous batching: each joins and leaves the batch between two tokens.

All computation runs on one thread. Requests to one model share its forward passes; an adapter and
its base are two models with shared weights, which take turns after each token.
"""

import contextlib
import dataclasses
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from finetune.inference.rows import Draw, Rows, can_share
from finetune.models.load_checks import token_rows
from finetune.models.vocabulary import pad_id
from finetune.serving.answer import Answer, Growing, Question, answer_alone
from finetune.serving.models import Served

READ_AT_ONCE = 2048
"""Maximum number of prompt tokens, including padding, that are read between two tokens of running
answers; a longer prompt is read alone."""
PASS = 16
"""Number of tokens whose forward pass on a CPU takes about as long as reading the weights."""


@dataclasses.dataclass(eq=False)
class Job:
    """A question and its pending answer."""

    growing: Growing
    draw: Draw
    answer: "Future[Answer]" = dataclasses.field(default_factory=Future)
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the client no longer needs the answer."""

    @property
    def ended(self) -> bool:
        return self.growing.ended or self.cancelled.is_set()

    def take(self, token: int, logits: torch.Tensor) -> None:
        """Append a token; an error ends this answer, but no other."""
        try:
            self.growing.take(token, logits)
        except Exception as error:
            self.fail(error)

    def finish(self) -> None:
        """Set the result to the answer generated so far."""
        try:
            answer = self.growing.finished()
        except Exception as error:
            self.fail(error)
        else:
            if not self.answer.done():
                self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        self.cancelled.set()
        if not self.answer.done():
            self.answer.set_exception(error)


class Scheduler:
    """Answers jobs in order of arrival, at most `rows` at once."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._new: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._groups: dict[tuple[int, str | None], _Group] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def submit(self, served: Served, question: Question, write: Callable[[str], None]) -> Job:
        """Queue a question; `write` receives final text on the scheduler's thread.

        Raises:
            FinetuneError: the prompt leaves no room for an answer in the context.
        """
        seed = secrets.randbits(63) if question.seed is None else question.seed
        job = Job(
            Growing(served, question, write), Draw(question.temperature, question.top_p, seed)
        )
        job.answer.set_running_or_notify_cancel()  # only `cancelled` ends a job
        self._new.put(job)
        return job

    def close(self) -> None:
        """End all unfinished answers."""
        self._closing.set()
        self._new.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        turns = _Turns()
        with torch.inference_mode(), contextlib.closing(turns):
            while not self._closing.is_set():
                self._admit()
                for key, group in list(self._groups.items()):
                    try:
                        turns.to(group.served)
                        group.step()
                    except Exception as error:  # such as out of memory: its rows are lost
                        group.fail(error)
                    if not group.jobs:
                        del self._groups[key]
        left = [*self._waiting, *(job for group in self._groups.values() for job in group.jobs)]
        for job in left:
            job.finish()

    def _admit(self) -> None:
        """Assign new jobs to their groups; blocks until one arrives if there is nothing to do."""
        busy = sum(len(group.jobs) for group in self._groups.values())
        with contextlib.suppress(queue.Empty):
            while True:
                idle = not busy and not self._waiting
                job = self._new.get(block=idle)
                if job is None:
                    break
                self._waiting.append(job)
        for job in [job for job in self._waiting if job.ended]:
            self._waiting.remove(job)
            job.finish()
        while self._waiting and busy < self.rows:
            served = self._waiting[0].growing.served
            key = (id(served.loaded.model), served.adapter)
            group = self._groups.setdefault(key, _Group(served))
            group.jobs.append(self._waiting.popleft())
            busy += 1


class _Turns:
    """Switches adapters, only when the active model changes."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._of: Served | None = None

    def to(self, served: Served) -> None:
        if served is not self._of:
            self.close()
            self._stack.enter_context(served.answering())
            self._of = served

    def close(self) -> None:
        self._of = None
        self._stack.close()


class _Group:
    """The jobs of one model: first the jobs in `rows`, in the same order, then the waiting ones."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.jobs: list[Job] = []
        self.rows: Rows | None = None
        model: Any = served.loaded.model
        self._shared = can_share(model)
        self._pad = pad_id(served.loaded.tokenizer, token_rows(model))

    def step(self) -> None:
        """Start waiting jobs, and generate one token for each running job."""
        if not self._shared:
            job = self.jobs.pop(0)
            try:
                answer_alone(job.growing, job.cancelled)
            except Exception as error:
                job.fail(error)
            else:
                job.finish()
            return
        self._leave()
        self._begin()
        if self.rows is None:
            return
        started = self.jobs[: len(self.rows)]
        tokens = self._choose(started, self.rows.logits)
        for job, token, logits in zip(started, tokens, self.rows.logits, strict=True):
            job.take(token, logits)
        stays = [not job.ended for job in started]
        self._leave()
        if self.rows is not None:
            kept = [token for token, stay in zip(tokens, stays, strict=True) if stay]
            self.rows.advance(kept)

    def fail(self, error: Exception) -> None:
        for job in self.jobs:
            job.fail(error)
        self.jobs, self.rows = [], None

    def _choose(self, jobs: list[Job], logits: torch.Tensor) -> list[int]:
        tokens = logits.argmax(-1).tolist()
        return [
            job.draw(row) if job.draw.temperature else token
            for job, row, token in zip(jobs, logits, tokens, strict=True)
        ]

    def _leave(self) -> None:
        """Finish jobs that have ended, and remove their rows."""
        started = 0 if self.rows is None else len(self.rows)
        ended = [job.ended for job in self.jobs]
        if not any(ended):
            return
        for job, end in zip(self.jobs, ended, strict=True):
            if end:
                job.finish()
        kept = [number for number in range(started) if not ended[number]]
        self.jobs = [job for job, end in zip(self.jobs, ended, strict=True) if not end]
        if not kept:
            self.rows = None
        elif self.rows is not None and len(kept) < started:
            self.rows.keep(kept)

    def _begin(self) -> None:
        """Read the prompts of waiting jobs, up to `READ_AT_ONCE` tokens."""
        started = 0 if self.rows is None else len(self.rows)
        prompts, longest = list[list[int]](), 0
        for job in self.jobs[started:]:
            longest = max(longest, len(job.growing.question.ids))
            if prompts and longest * (len(prompts) + 1) > READ_AT_ONCE:
                break
            prompts.append(job.growing.question.ids)
        if not prompts:
            return
        order, passes = in_passes(prompts, self.served.loaded.model.device)
        new = self.jobs[started : started + len(prompts)]
        self.jobs[started : started + len(prompts)] = [new[number] for number in order]
        read = [Rows(self.served.loaded.model, each, self._pad) for each in passes]
        rows = self.rows or read.pop(0)
        rows.join(*read)
        self.rows = rows


def in_passes(
    prompts: Sequence[list[int]], device: torch.device
) -> tuple[list[int], list[list[list[int]]]]:
    """Group prompts into forward passes.

    On a CPU, a forward pass takes time for each token, including padding, and time for reading the
    weights that equals `PASS` tokens. A prompt joins shorter ones if that needs less padding.

    Returns:
        Indices of the prompts in the order of the passes, and the prompts of each pass.
    """
    if device.type != "cpu":
        return list(range(len(prompts))), [list(prompts)]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    passes: list[list[list[int]]] = []
    for number in order:
        prompt = prompts[number]
        last = passes[-1] if passes else []
        if last and len(last) * (len(prompt) - len(last[-1])) <= PASS:
            last.append(prompt)
        else:
            passes.append([prompt])
    return order, passes
