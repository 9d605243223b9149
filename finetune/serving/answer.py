"""Answer one request: tokens with their log-probabilities, and text that ends before a stop."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from finetune.errors import FinetuneError
from finetune.inference.chat import TextStream
from finetune.inference.generate import continue_rows, room_for
from finetune.serving.models import Served


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and how it is to be answered."""

    ids: list[int]
    most: int | None
    """Tokens of an answer at most; None up to the end of the context, or 512 without one."""
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
    """An answer that is complete."""

    text: str
    tokens: list[Token]
    """Without the stop token; empty where no log-probabilities were asked for."""
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    """`stop`, or `length` where the answer was cut."""


WITHOUT_LIMIT = 512
"""Tokens of an answer where neither the request nor the model names a limit."""


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


def answer(
    served: Served,
    question: Question,
    write: Callable[[str], None],
    cancelled: threading.Event,
) -> Answer:
    """Generate, writing the text as it becomes certain; stops early once `cancelled` is set."""
    loaded = served.loaded
    cut = UntilStop(question.stops, write)
    scores = None if question.likelihoods is None else Likelihoods(question.likelihoods)
    stream = Stream(served, question.ids, cut.feed, scores)
    if question.seed is not None:
        torch.manual_seed(question.seed)
    with served.answering():
        continue_rows(
            loaded,
            [question.ids],
            room(served, question),
            question.temperature,
            question.top_p,
            stream,
            stopping=[Ended(cut, cancelled)],
            processors=[scores] if scores is not None else [],
        )
    cut.flush()
    ended = stream.ended or cut.found
    return Answer(
        text=cut.text,
        tokens=stream.tokens,
        prompt_tokens=len(question.ids),
        new_tokens=stream.count,
        finish_reason="stop" if ended else "length",
    )


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


class Likelihoods(LogitsProcessor):
    """Log-probabilities of the model itself at the newest place, before temperature and top_p."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.newest: torch.Tensor | None = None  # (vocabulary,)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.newest = scores[0].float().log_softmax(-1)
        return scores

    def of(self, id: int) -> Token:
        assert self.newest is not None
        best = self.newest.topk(min(self.count, len(self.newest)))
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(id, self.newest[id].item(), pairs)


class Stream(TextStream):
    """Text of an answer while it grows, with its tokens."""

    def __init__(
        self,
        served: Served,
        prompt: list[int],
        write: Callable[[str], None],
        likelihoods: Likelihoods | None,
    ) -> None:
        super().__init__(served.loaded, prompt, write)
        self.likelihoods = likelihoods
        self.tokens: list[Token] = []
        self.count = 0
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        if self.ids is not None:
            for id in value.flatten().tolist():
                self.count += 1
                self.ended = id in self.loaded.stops
                if self.likelihoods is not None and not self.ended:
                    self.tokens.append(self.likelihoods.of(id))
        super().put(value)


class Ended(StoppingCriteria):
    """Whether a stop text was found, or nobody wants the answer any more."""

    def __init__(self, cut: UntilStop, cancelled: threading.Event) -> None:
        self.cut, self.cancelled = cut, cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.cut.found or self.cancelled.is_set()
        return torch.full((len(input_ids),), ends, device=input_ids.device)
