"""The answer to one request: tokens with log-probabilities, and text up to a stop sequence."""

import contextlib
import dataclasses
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

import torch
from starlette.exceptions import HTTPException

from finetune.data.chat.tokens import Row as PromptRow
from finetune.errors import FinetuneError
from finetune.inference.chat import TextStream
from finetune.inference.decoder import Row
from finetune.inference.generate import row_of
from finetune.inference.noise import words_of
from finetune.serving.models import Served
from finetune.serving.requests import Request


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of an answer with its log-probability, and the most likely tokens at its position."""

    id: int
    logprob: float
    likeliest: list[tuple[int, float]]


@dataclasses.dataclass
class Answer:
    """A complete answer."""

    text: str
    tokens: list[Token]
    """Tokens without the stop token; empty if no log-probabilities were requested."""
    prompt_ids: list[int]
    new_tokens: int
    finish_reason: str
    """`stop`, or `length` if the answer was truncated."""


UNLIKELY = -9999.0
"""Log-probability of impossible tokens in OpenAI's API, as JSON has no infinity."""
WITHOUT_LIMIT = 512
"""Maximum tokens of an answer if neither the request nor the model has a limit."""


def room(served: Served, ids: list[int], most: int | None) -> int:
    """Maximum number of tokens of an answer, at most `most`.

    Raises:
        FinetuneError: the prompt is empty, has invalid token ids, or fills the context.
    """
    loaded = served.loaded
    if not ids:
        raise FinetuneError("the prompt is empty")
    rows = len(loaded.tokenizer)
    if max(ids) >= rows:
        raise FinetuneError(f"prompt: got token {max(ids)}, but the vocabulary has {rows}")
    left = row_of(loaded, ids, most or (loaded.context or WITHOUT_LIMIT)).limit
    if left < 1:
        raise FinetuneError(f"{len(ids)} tokens leave no room in a context of {loaded.context}")
    return left


class Reply(Row):
    """An answer in progress, which passes on text as soon as it is final.

    It is computed on the thread of the scheduler; an error ends this answer, but no other.
    """

    def __init__(
        self, served: Served, prompt: PromptRow, asked: Request, write: Callable[[str], None]
    ) -> None:
        """Raises FinetuneError for an invalid prompt, as `room` does."""
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        ids, stops = prompt.ids, served.loaded.stops
        limit = room(served, ids, asked.most)
        super().__init__(
            ids, limit, stops, asked.temperature, asked.top_p, words_of(seed), max(0, asked.top_k),
            asked.min_p, asked.repetition_penalty, prompt.images,
        )  # fmt: skip
        self.served, self.likelihoods = served, asked.likelihoods
        self.answer: Future[Answer] = Future()
        self.answer.set_running_or_notify_cancel()  # only `cancelled` ends an answer
        self.cancelled = threading.Event()
        """Set when the client no longer needs the answer."""
        self._cut = UntilStop(asked.stop or (), write)
        self._stream = TextStream(served.loaded, ids, self._cut.feed)
        self._tokens: list[Token] = []

    @property
    def ended(self) -> bool:
        """Whether it reached a stop token, a stop sequence or the limit, or is cancelled."""
        return super().ended or self._cut.found or self.cancelled.is_set()

    def take(self, token: int, logits: torch.Tensor) -> None:
        super().take(token, logits)
        try:
            self._check(logits)
            if self.stopped:
                return
            if self.likelihoods is not None:
                self._tokens.append(_likely(token, logits, self.likelihoods))
            self._stream.append([token])
        except Exception as error:
            self.fail(error)

    def _check(self, logits: torch.Tensor) -> None:
        largest = logits.max().item()  # NaN if there is one
        if not math.isfinite(largest):
            raise HTTPException(
                500,
                f"model {self.served.name}: the largest logit of token {len(self.ids)} is "
                f"{largest}, expected a number; its weights are damaged, or too large for its "
                "precision",
            )

    def finish(self) -> None:
        """Pass on the remaining text, and set the result to the answer generated so far."""
        if self.answer.done():
            return
        try:
            self._stream.end()
            self._cut.flush()
        except Exception as error:
            self.fail(error)
            return
        with contextlib.suppress(InvalidStateError):  # it has failed on another thread
            self.answer.set_result(
                Answer(
                    text=self._cut.text,
                    tokens=self._tokens,
                    prompt_ids=list(self.prompt),
                    new_tokens=len(self.ids),
                    finish_reason="stop" if self.stopped or self._cut.found else "length",
                )
            )

    def fail(self, error: Exception) -> None:
        """End with an error, unless the answer is complete."""
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)
        self.cancelled.set()  # after it, or the scheduler's thread would call what it has complete


def _likely(id: int, logits: torch.Tensor, count: int) -> Token:
    logs = logits.float().log_softmax(-1).clamp_min(UNLIKELY)
    best = logs.topk(min(count, len(logs)))
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(id, logs[id].item(), pairs)


class UntilStop:
    """Passes on text up to the first stop sequence, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str], write: Callable[[str], None]) -> None:
        self.stops, self.write = stops, write
        self.text = self._held = ""
        self.found = False

    def feed(self, piece: str) -> None:
        if self.found:
            return
        self._held += piece
        at = min((i for i in map(self._held.find, self.stops) if i >= 0), default=-1)
        if at >= 0:
            self.found = True
            self._pass(at)
        else:
            self._pass(len(self._held) - self._begun())

    def flush(self) -> None:
        """Pass on the held-back text at the end of the answer."""
        if not self.found:
            self._pass(len(self._held))

    def _begun(self) -> int:
        """Number of characters at the end that may be the start of a stop sequence."""
        return max(
            (
                length
                for stop in self.stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )

    def _pass(self, length: int) -> None:
        passed, self._held = self._held[:length], self._held[length:]
        self.text += passed
        if passed:
            self.write(passed)
