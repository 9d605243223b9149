"""Answer one request: tokens with their log-probabilities, and text that ends before a stop."""

import dataclasses
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
    """Tokens that are listed beside the chosen one, by falling probability; None for none."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of an answer, with its log-probability and those of the likeliest at its place."""

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


WITHOUT_LIMIT = 512
"""Maximum tokens of an answer if neither the request nor the model has a limit."""


def room(served: Served, question: Question) -> int:
    """Tokens that an answer may have.

    Raises:
        FinetuneError: the prompt is empty, has ids that are no tokens, or fills the context.
    """
    loaded = served.loaded
    most = question.most or (loaded.context or WITHOUT_LIMIT)
    left = room_for(loaded, len(question.ids), most)
    if not question.ids:
        raise FinetuneError("the prompt is empty")
    rows = len(loaded.tokenizer)
    if max(question.ids) >= rows:
        raise FinetuneError(f"prompt: got token {max(question.ids)}, and there are {rows}")
    if left < 1:
        raise FinetuneError(
            f"{len(question.ids)} tokens leave no room in a context of {loaded.context}"
        )
    return left


class Growing:
    """An answer in progress: takes tokens, and passes on text as soon as it is final."""

    def __init__(self, served: Served, question: Question, write: Callable[[str], None]) -> None:
        """Raises FinetuneError for a prompt that leaves no room to answer, as `room` does."""
        self.served, self.question = served, question
        self.room = room(served, question)
        self._cut = UntilStop(question.stops, write)
        self._stream = TextStream(served.loaded, question.ids, self._cut.feed)
        self._tokens: list[Token] = []
        self._count = 0
        self._stopped = False

    @property
    def ended(self) -> bool:
        """Whether nothing more comes: a stop token or text, or the limit."""
        return self._stopped or self._cut.found or self._count >= self.room

    def take(self, id: int, logits: torch.Tensor) -> None:
        """Append a token, which was chosen by the model's logits, (vocabulary,)."""
        self._count += 1
        self._stopped = id in self.served.loaded.stops
        if self._stopped:
            return
        if self.question.likelihoods is not None:
            self._tokens.append(_likely(id, logits, self.question.likelihoods))
        self._stream.append([id])

    def finished(self) -> Answer:
        """The answer, all of whose text has been passed on."""
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
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(count, len(logs)))
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(id, logs[id].item(), pairs)


def answer_alone(growing: Growing, cancelled: threading.Event) -> None:
    """Fill an answer with `generate` of transformers, for a model whose rows share no cache."""
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
    """The model's own logits at the newest place, before temperature and top_p."""

    newest = torch.empty(0)  # (vocabulary,)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.newest = scores[0]
        return scores


class _Feeder(BaseStreamer):
    """Gives an answer the tokens of `generate`, whose first call brings the prompt."""

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
    """Whether a stop text was found, or the answer was cancelled."""

    def __init__(self, growing: Growing, cancelled: threading.Event) -> None:
        self.growing, self.cancelled = growing, cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.growing.ended or self.cancelled.is_set()
        return torch.full((len(input_ids),), ends, device=input_ids.device)


class UntilStop:
    """Passes text on up to the first of some stop texts, holding back what may begin one."""

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
        """Pass on what was held back, once nothing more comes."""
        if not self.found:
            self._pass(len(self._held))

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        return max(
            (
                length
                for stop in self.stops
                for length in range(1, len(stop))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )

    def _pass(self, length: int) -> None:
        passed, self._held = self._held[:length], self._held[length:]
        self.text += passed
        if passed:
            self.write(passed)
