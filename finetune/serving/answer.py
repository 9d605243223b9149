"""The answer to one request: tokens with log-probabilities, and text up to a stop sequence."""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from finetune.errors import FinetuneError
from finetune.inference.chat import TextStream
from finetune.inference.generate import continue_rows, room_for
from finetune.serving.models import Served


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt with its generation settings."""

    ids: list[int]
    most: int | None
    """Maximum tokens of an answer; None for the rest of the context, or 512 without a limit."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stops: Sequence[str] = ()
    likelihoods: int | None = None
    """Number of most likely tokens listed per position; None for no log-probabilities."""


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
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    """`stop`, or `length` if the answer was truncated."""


UNLIKELY = -9999.0
"""Log-probability of impossible tokens in OpenAI's API, as JSON has no infinity."""
WITHOUT_LIMIT = 512
"""Maximum tokens of an answer if neither the request nor the model has a limit."""


class BrokenModel(Exception):
    """The model computes no usable logits."""


def room(served: Served, question: Question) -> int:
    """Maximum number of tokens of an answer.

    Raises:
        FinetuneError: the prompt is empty, has invalid token ids, or fills the context.
    """
    loaded = served.loaded
    most = question.most or (loaded.context or WITHOUT_LIMIT)
    left = room_for(loaded, len(question.ids), most)
    if not question.ids:
        raise FinetuneError("the prompt is empty")
    rows = len(loaded.tokenizer)
    if max(question.ids) >= rows:
        raise FinetuneError(f"prompt: got token {max(question.ids)}, but the vocabulary has {rows}")
    if left < 1:
        raise FinetuneError(
            f"{len(question.ids)} tokens leave no room in a context of {loaded.context}"
        )
    return left


class Growing:
    """An answer in progress: takes tokens, and passes on text as soon as it is final."""

    def __init__(self, served: Served, question: Question, write: Callable[[str], None]) -> None:
        """Raises FinetuneError for an invalid prompt, as `room` does."""
        self.served, self.question = served, question
        self.room = room(served, question)
        self._cut = UntilStop(question.stops, write)
        self._stream = TextStream(served.loaded, question.ids, self._cut.feed)
        self._tokens: list[Token] = []
        self._count = 0
        self._stopped = False

    @property
    def ended(self) -> bool:
        """Whether the answer reached a stop token, a stop sequence or the limit."""
        return self._stopped or self._cut.found or self._count >= self.room

    def take(self, id: int, logits: torch.Tensor) -> None:
        """Append a token that was chosen from the logits (vocabulary,) of the model.

        Raises:
            BrokenModel: the logits contain NaN or infinity, so that no token can be chosen.
        """
        self._count += 1
        largest = logits.max().item()  # NaN if there is one
        if not math.isfinite(largest):
            raise BrokenModel(
                f"model {self.served.name}: the largest logit of token {self._count} is {largest}, "
                "expected a number; its weights are damaged, or too large for its precision"
            )
        self._stopped = id in self.served.loaded.stops
        if self._stopped:
            return
        if self.question.likelihoods is not None:
            self._tokens.append(_likely(id, logits, self.question.likelihoods))
        self._stream.append([id])

    def finished(self) -> Answer:
        """Pass on the remaining text, and return the answer."""
        self._stream.end()
        self._cut.flush()
        return Answer(
            text=self._cut.text,
            tokens=self._tokens,
            prompt_tokens=len(self.question.ids),
            new_tokens=self._count,
            finish_reason="stop" if self._stopped or self._cut.found else "length",
        )


def _likely(id: int, logits: torch.Tensor, count: int) -> Token:
    logs = logits.float().log_softmax(-1).clamp_min(UNLIKELY)
    best = logs.topk(min(count, len(logs)))
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(id, logs[id].item(), pairs)


def answer_alone(growing: Growing, cancelled: threading.Event) -> None:
    """Complete an answer with `generate` of transformers, for a model that cannot batch rows."""
    served, question = growing.served, growing.question
    scores = _Scores()
    continue_rows(
        served.loaded,
        [question.ids],
        growing.room,
        question.temperature,
        question.top_p,
        _Feeder(growing, scores),
        stopping=[_Ended(growing, cancelled)],
        processors=[scores],
    )


class _Scores(LogitsProcessor):
    """Stores the logits of the model for the newest token, before temperature and top_p."""

    newest = torch.empty(0)  # (vocabulary,)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.newest = scores[0]
        return scores


class _Feeder(BaseStreamer):
    """Passes tokens from `generate` to an answer, except the first call with the prompt."""

    def __init__(self, growing: Growing, scores: _Scores) -> None:
        self.growing, self.scores = growing, scores
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self.growing.take(int(value.flatten()[0]), self.scores.newest)
        self._begun = True

    def end(self) -> None:
        pass


class _Ended(StoppingCriteria):
    """Stops `generate` when the answer has ended or was cancelled."""

    def __init__(self, growing: Growing, cancelled: threading.Event) -> None:
        self.growing, self.cancelled = growing, cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.growing.ended or self.cancelled.is_set()
        return torch.full((len(input_ids),), ends, device=input_ids.device)


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
