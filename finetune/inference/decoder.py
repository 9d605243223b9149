"""Continue rows of tokens with continuous batching: the one loop behind everything that generates.

A finished row leaves the batch, and a waiting one joins it after its prompt. Rows are aligned at
their last token. The answer of a row does not depend on other rows: padding is masked, positions
start at the first token of each row, and each row has its own noise. Logits differ only by
rounding, because matrix products of several rows add in another order: in fp32 only ties can
differ.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from finetune.data.images.image_file import PlacedImage
from finetune.data.images.inputs import ImageInputs
from finetune.inference.batch import Batch, Forward, cached_attention, can_join
from finetune.inference.noise import draw

if TYPE_CHECKING:
    from finetune.distributed.base import Engine

QUARTER = 0.25
"""Share of the rows that leave or join a batch together, because each time the cache is copied."""
PASS = 16
"""Number of tokens whose forward pass on a CPU takes about as long as reading the weights."""


@dataclasses.dataclass(eq=False)
class Row:
    """A prompt, and the tokens that continue it."""

    prompt: Sequence[int]
    limit: int
    """Maximum number of new tokens."""
    stops: Container[int]
    temperature: float = 0.0
    """0 selects the most likely token."""
    top_p: float = 1.0
    """Total probability of the smallest set of most likely tokens that are considered."""
    name: tuple[int, int] = (0, 0)
    """Two words below 2**32 on which the noise of this row depends."""
    top_k: int = 0
    """Number of most likely tokens that are considered; 0 for all."""
    min_p: float = 0.0
    """Least probability of a token that is considered, as a share of the largest."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits of tokens in the prompt or the answer; a factor of negative ones
    (arXiv:1909.05858, section 4.1)."""
    images: Sequence[PlacedImage] = ()
    """Images among the tokens of the prompt."""
    ids: list[int] = dataclasses.field(default_factory=list[int])
    """New tokens, including the stop token."""
    stopped: bool = False
    """Whether it ended with a stop token rather than at its limit."""
    entropy: float = 0.0
    """Entropy in nats before tokens are left out, summed over the new tokens."""
    logps: list[float] = dataclasses.field(default_factory=list[float])
    """Log-probability of each new token among those considered, if the row `is_changed`."""

    @property
    def read(self) -> tuple[object, ...]:
        """What the model reads of the prompt, equal for equal prompts."""
        return (*self.prompt, *(image.digest for image in self.images))

    @property
    def is_changed(self) -> bool:
        """Whether it samples from another distribution than the softmax of logits / temperature."""
        left_out = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return left_out or self.repetition_penalty != 1

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.ids) >= self.limit

    @property
    def text_ids(self) -> list[int]:
        """New tokens without the stop token."""
        return self.ids[:-1] if self.stopped else self.ids

    def take(self, token: int, logits: torch.Tensor) -> None:
        """Append a token that was chosen from the logits (vocabulary,) of the model."""
        self.ids.append(token)
        self.stopped = token in self.stops


@torch.no_grad()
def decode(
    model: nn.Module,
    rows: Sequence[Row],
    pad: int,
    at_once: int,
    key: tuple[int, int] = (0, 0),
    *,
    engine: "Engine | None" = None,
    inputs: ImageInputs | None = None,
    report: Callable[[int], None] = lambda ended: None,
) -> None:
    """Continue all rows to their ends.

    Args:
        model: Causal language model, possibly with an adapter.
        rows: Rows, which get their new tokens.
        pad: Any token id, for the masked padding on the left.
        at_once: Maximum number of rows in a batch.
        key: Two words on which the noise of all rows depends.
        engine: Runs the model, if its weights are divided among ranks.
        inputs: How images of rows become inputs of the model; None if it reads text only. Tokens
            that stand for images are then never generated.
        report: Called with the number of rows that ended since the last call.
    """
    joins = len(rows) > at_once
    model.eval()
    decoder = Decoder(model, pad, at_once, key, joins=joins, engine=engine, inputs=inputs)
    decoder.waiting.extend(sorted(rows, key=lambda row: (len(row.prompt), tuple(row.prompt))))
    reported = 0
    with cached_attention(model):
        while decoder.step():
            ended = sum(row.ended for row in rows)
            report(ended - reported)
            reported = ended


class Decoder:
    """Generates a token for each of its rows at every step.

    Attributes:
        waiting: Rows that join the batch when there is room.
        rows: Rows of the batch, and those that have ended but not left it.
    """

    def __init__(
        self,
        model: nn.Module,
        pad: int,
        at_once: int,
        key: tuple[int, int] = (0, 0),
        *,
        joins: bool = True,
        read_at_once: int | None = None,
        engine: "Engine | None" = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        """See `decode` for the other arguments.

        Args:
            joins: Let rows join a batch, which needs a cache that keeps all tokens of windows.
            read_at_once: Maximum number of prompt tokens, including padding, that are read between
                two tokens of running rows; a longer prompt is read alone.
        """
        self.pad, self.at_once, self.key, self.read_at_once = pad, at_once, key, read_at_once
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self.batch: Batch | None = None
        self._agree = list if engine is None else engine.largest
        self._forward = Forward(model, joins and can_join(model), engine, inputs)
        self._tokens: list[int] = []
        """The newest token of each row, which the model has not read."""

    def step(self) -> bool:
        """Generate a token for each running row, and read prompts; False if there is nothing to do.

        Ranks that divide the model run equally many forward passes, on padding if need be.
        """
        passes = self._admit()
        reads, advances = self._agree([len(passes), int(self.batch is not None)])
        if not reads and not advances:
            return False
        if self.batch is not None:
            self.batch.advance(self._tokens)
        elif advances:
            Batch(self._forward, [(self.pad,)], self.pad)
        read = [self._read(rows) for rows in passes]
        for _ in range(len(passes), reads):
            Batch(self._forward, [(self.pad,)], self.pad)
        if read:
            joined = [self.batch, *read] if self.batch is not None else read
            self.batch = joined[0]
            self.batch.join(*joined[1:])
        if self.batch is not None:
            self._take(self.batch.logits)
        return True

    def _admit(self) -> list[list[Row]]:
        """Let rows leave, and select waiting rows to read, one list for each forward pass."""
        running = [number for number, row in enumerate(self.rows) if not row.ended]
        new, ended = self._new(len(running)), len(self.rows) - len(running)
        if not running:
            self.batch, self.rows = None, []
        elif self.batch is not None and ended and (new or ended >= QUARTER * len(self.rows)):
            self.batch.keep(running)
            self.rows = [self.rows[number] for number in running]
            self._tokens = [self._tokens[number] for number in running]
        if not new:
            return []
        apart = self._forward.joins and self._forward.device.type == "cpu"
        passes = in_passes(new) if apart else [new]
        self.rows += [row for rows in passes for row in rows]
        return passes

    def _new(self, running: int) -> list[Row]:
        """Waiting rows that are read now: as many as there is room for, if that is a quarter."""
        room = self.at_once - running
        if room < 1 or (running and not self._forward.joins):
            return []
        self.waiting = deque(row for row in self.waiting if not row.ended)
        if room < min(len(self.waiting), QUARTER * self.at_once):
            return []
        new, longest = list[Row](), 0
        while self.waiting and len(new) < room:
            longest = max(longest, len(self.waiting[0].prompt))
            if new and self.read_at_once and longest * (len(new) + 1) > self.read_at_once:
                break
            new.append(self.waiting.popleft())
        return new

    def _read(self, rows: list[Row]) -> Batch:
        """The batch after the prompts of rows; repeated prompts go through the model only once."""
        first = dict[tuple[object, ...], Row]()
        for row in rows:
            first.setdefault(row.read, row)
        images = [row.images for row in first.values()]
        batch = Batch(self._forward, [row.prompt for row in first.values()], self.pad, images)
        if len(first) < len(rows):
            numbers = {read: number for number, read in enumerate(first)}
            batch.keep([numbers[row.read] for row in rows])
        return batch

    def _take(self, logits: torch.Tensor) -> None:
        tokens, entropies = self._choose(logits)
        self._tokens = tokens.tolist()
        each = zip(self.rows, self._tokens, entropies.tolist(), logits.unbind(), strict=True)
        for row, token, entropy, of_row in each:
            if not row.ended:
                row.entropy += entropy
                row.take(token, of_row)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row, and the entropy of its distribution, both (rows,).

        The token with the largest probability / exponential noise is a sample from the
        probabilities.
        """
        sampled = [number for number, row in enumerate(self.rows) if row.temperature]
        rows, device = [self.rows[number] for number in sampled], logits.device
        logits = with_penalties(logits, self.rows)
        entropies = torch.zeros(len(logits), device=device)
        if not sampled:
            return logits.argmax(-1), entropies
        mixed = len(sampled) < len(logits)
        heat = torch.tensor([[row.temperature] for row in rows], device=device)
        logps = ((logits[sampled] if mixed else logits).float() / heat).log_softmax(-1)
        shares = logps.exp()
        spread = -torch.linalg.vecdot(shares, logps)
        changed = [number for number, row in enumerate(rows) if row.is_changed]
        for number in changed:
            keep_likely(shares[number], rows[number])
        names = torch.tensor([row.name for row in rows], device=device)
        tokens = draw(shares, self.key, names, [len(row.ids) for row in rows])
        if changed:
            kept = shares[changed]
            logs = (kept.gather(1, tokens[changed, None]) / kept.sum(-1, keepdim=True)).log()
            for number, logp in zip(changed, logs[:, 0].tolist(), strict=True):
                if not rows[number].ended:
                    rows[number].logps.append(logp)
        if not mixed:
            return tokens, spread
        best = logits.argmax(-1)
        best[sampled], entropies[sampled] = tokens, spread
        return best, entropies


def with_penalties(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits (rows, vocabulary) after each row's `repetition_penalty`; without any, as given."""
    if all(row.repetition_penalty == 1 for row in rows):
        return logits
    logits = logits.float()
    found = logits.clone()  # callers read the original
    for number, row in enumerate(rows):
        seen = torch.tensor(sorted({*row.prompt, *row.ids}), device=logits.device)
        given, penalty = logits[number, seen], row.repetition_penalty
        found[number, seen] = torch.where(given > 0, given / penalty, given * penalty)
    return found


def keep_likely(shares: torch.Tensor, row: Row) -> None:
    """Set probabilities (vocabulary,) to 0 by `top_k`, `top_p` and `min_p`, in this order.

    `top_p` is a share of what `top_k` leaves; `min_p` is one of the largest probability.
    """
    falling, order = shares.sort(descending=True)
    if row.top_k:
        falling[row.top_k :] = 0
    before = falling.cumsum(-1) - falling
    left_out = (before >= row.top_p * falling.sum()) | (falling < row.min_p * falling[0])
    if row.top_k:
        left_out[row.top_k :] = True
    shares[order[left_out]] = 0


def in_passes(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows into forward passes over their prompts on a CPU.

    A pass takes time for each token, including padding, and time for reading the weights that
    equals `PASS` tokens. A prompt joins shorter ones if that needs less padding.
    """
    passes, prompts = list[list[Row]](), 0
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        before = passes[-1][-1] if passes else None
        if before is None or prompts * (len(row.prompt) - len(before.prompt)) > PASS:
            passes.append([row])
            prompts = 1
        else:
            passes[-1].append(row)
            prompts += row.read != before.read  # repeated prompts are read once
    return passes
