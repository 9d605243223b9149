"""Sample completions in batches with a KV cache and separate noise for each completion.

Each token maximizes probability / exponential noise, which is equivalent to adding Gumbel noise to
the logits. The noise depends only on (seed, step, prompt, number, place) and the token id.
Therefore a completion does not depend on its batch or on the number of processes, except for
rounding of logits: in fp32 only ties can differ.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from finetune.kernels import cpu
from finetune.planner.estimate.sampling import ROOM

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
"""Constants of Philox4x32-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""
COMPACT = 0.75
"""Share of unfinished rows at or below which finished rows are removed from the cache."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request for one completion."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    row: int
    """Index of the prompt, for the noise."""
    number: int
    """Index among the completions of the prompt."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled completion."""

    ids: list[int]
    """Token ids, including the stop token."""
    ended: bool
    """Whether it ended with a stop token rather than at the limit."""
    entropy: float
    """Entropy of the sampling distribution in nats, summed over the tokens."""
    logps: tuple[float, ...] = ()
    """Log-probability of each token, if another program sampled it."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples completions from a model."""

    model: torch.nn.Module
    stops: tuple[int, ...]
    limit: int
    """Maximum tokens of a completion."""
    temperature: float
    """0 selects the most likely token."""
    pad_id: int
    batch_rows: int = 64
    """Maximum number of completions in a batch."""

    @torch.no_grad()
    def __call__(self, wanted: Sequence[Wanted], seed: int, step: int) -> list[Completion]:
        """One completion per request, in order; prompts of similar length share a batch."""
        order = sorted(range(len(wanted)), key=lambda i: (len(wanted[i].prompt), wanted[i].prompt))
        found: dict[int, Completion] = {}
        self.model.eval()
        with cached_attention(self.model):
            for start in range(0, len(order), self.batch_rows):
                some = order[start : start + self.batch_rows]
                batch = self._batch([wanted[i] for i in some], (seed, step))
                found |= zip(some, batch, strict=True)
        return [found[i] for i in range(len(wanted))]

    def _batch(self, wanted: list[Wanted], key: tuple[int, int]) -> list[Completion]:
        state = _State.of_prompts(self.model, wanted, self.pad_id)
        device, rows = state.logits.device, len(wanted)
        stops = torch.tensor(self.stops, device=device, dtype=torch.int64)
        names = torch.tensor([[each.row, each.number] for each in wanted], device=device)
        ids = torch.full((rows, self.limit), self.pad_id, device=device)
        lengths = torch.full((rows,), self.limit, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        entropies = torch.zeros(rows, dtype=torch.float64, device=device)
        alive = torch.arange(rows, device=device)
        for place in range(self.limit):
            shares, spread = _shares(state.logits, self.temperature or 1.0)
            entropies[alive] += torch.where(ended[alive], 0.0, spread.double())
            if self.temperature:
                tokens = draw(shares, key, names[alive], place)
            else:
                tokens = state.logits.argmax(-1)
            going = ~ended[alive]
            ids[alive[going], place] = tokens[going]
            stopped = going & torch.isin(tokens, stops)
            lengths[alive[stopped]] = place + 1
            ended[alive[stopped]] = True
            left = int((~ended[alive]).sum())
            if not left or place + 1 == self.limit:
                break
            if left <= COMPACT * len(alive):
                kept = torch.nonzero(~ended[alive])[:, 0]
                alive, tokens = alive[kept], tokens[kept]
                state.keep(kept)
            state.advance(tokens)
        return [
            Completion(row[:length], end, entropy)
            for row, length, end, entropy in zip(
                ids.tolist(), lengths.tolist(), ended.tolist(), entropies.tolist(), strict=True
            )
        ]


class _State:
    """The state of a batch between two tokens: cache, mask, and logits of the next token."""

    def __init__(self, model: torch.nn.Module, mask: torch.Tensor | None) -> None:
        self.model = model
        self.mask = mask  # (rows, tokens); None without padding
        self.cache: Any = None
        self.named = ""  # models that are recurrent throughout have another name for it
        self.positions = torch.empty(0)
        self.logits = torch.empty(0)

    @classmethod
    def of_prompts(cls, model: torch.nn.Module, wanted: list[Wanted], pad: int) -> "_State":
        """The state after the prompts; repeated prompts go through the model only once."""
        prompts = list(dict.fromkeys(each.prompt for each in wanted))
        device = next(model.parameters()).device
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = torch.arange(longest, device=device) >= (longest - lengths)[:, None]
        state = cls(model, None if min(map(len, prompts)) == longest else mask.long())
        positions = (torch.arange(longest, device=device) - (longest - lengths)[:, None]).clamp(0)
        state._forward(ids, positions)
        state.positions = lengths
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        state.keep(torch.tensor([numbers[each.prompt] for each in wanted], device=device))
        return state

    def keep(self, rows: torch.Tensor) -> None:
        """Select rows by index; an index may occur several times."""
        self.cache.reorder_cache(rows)  # every kind of layer has it, states of recurrences too
        for layer in self.cache.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer
        self.positions, self.logits = self.positions[rows], self.logits[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def advance(self, tokens: torch.Tensor) -> None:
        """Append a token to each row."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self._forward(tokens[:, None], self.positions[:, None])
        self.positions = self.positions + 1

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **({} if self.cache is None else {self.named: self.cache}),
        )
        self.named = "cache_params" if "cache_params" in output else "past_key_values"
        self.cache, self.logits = output[self.named], output.logits[:, -1]


class GrowingLayer(DynamicLayer):
    """A cache layer with spare capacity, so that appending a token does not copy the others."""

    room = ROOM
    """Tokens by which its tensors grow."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = _appended(self.keys, key_states, self.room)
        self.values = _appended(self.values, value_states, self.room)
        return self.keys, self.values


def _appended(cached: torch.Tensor, new: torch.Tensor, room: int) -> torch.Tensor:
    """`new` appended to `held`, in place if the memory of `held` has room.

    Both are (rows, heads, tokens, head size).
    """
    before, after = cached.shape[-2], cached.shape[-2] + new.shape[-2]
    buffer = _with_room(cached)
    if buffer.shape[-2] < after:
        buffer = cached.new_empty(*cached.shape[:2], after + room, cached.shape[-1])
        buffer[:, :, :before] = cached
    buffer[:, :, before:after] = new
    return buffer[:, :, :after]


def _with_room(cached: torch.Tensor) -> torch.Tensor:
    """The tensor that `held` is a view of, else `held` itself: (rows, heads, tokens, head size).

    It is reconstructed from strides, because a view made in inference mode does not know its base.
    """
    rows, heads, _, size = cached.shape
    width = cached.stride(1) // size
    strides = heads * width * size, width * size, size, 1
    if cached.stride() != strides or cached.storage_offset():
        return cached
    if cached.untyped_storage().nbytes() != rows * strides[0] * cached.element_size():
        return cached
    return cached.as_strided((rows, heads, width, size), strides)


def _shares(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of each row, (rows, vocabulary) fp32, and their entropy in nats, (rows,)."""
    logs = (logits.float() / temperature).log_softmax(-1)
    shares = logs.exp()
    return shares, -torch.linalg.vecdot(shares, logs)


@contextlib.contextmanager
def cached_attention(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that replaces the `documents` attention, which does not support a cache."""
    network: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    config = network.config.get_text_config()
    usual = config._attn_implementation
    if usual != "documents":
        yield
        return
    config._attn_implementation = "sdpa" if network._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = usual


# --- noise -------------------------------------------------------------------------------------


def exponential(
    key: tuple[int, int], names: torch.Tensor, place: int, vocabulary: int
) -> torch.Tensor:
    """Exponential noise of every token of the vocabulary, (rows, vocabulary) fp64.

    Args:
        key: Seed and step.
        names: (rows, 2) int64, the indices of each row's prompt and completion.
        place: Position of the token in its completion.
        vocabulary: Number of tokens in the vocabulary.
    """
    blocks = torch.arange(-(-vocabulary // 4), device=names.device)
    places = torch.full((1, 1), place, device=names.device)
    words = philox((blocks[None], places, names[:, 1:], names[:, :1]), key)
    uniform = torch.cat(words, dim=1)[:, :vocabulary].double()
    return uniform.add_(0.5).mul_(2.0**-32).log_().neg_()


def draw(
    shares: torch.Tensor, key: tuple[int, int], names: torch.Tensor, place: int
) -> torch.Tensor:
    """The token of each row with the largest probability / noise, (rows,) int64.

    Args:
        shares: Probabilities, (rows, vocabulary) fp32.
        key: Seed and step.
        names: (rows, 2) int64, as in `exponential`.
        place: Position of the token in its completion.
    """
    tokens = cpu.draw(shares, key, names, place)
    if tokens is not None:
        return tokens
    return exponential(key, names, place, shares.shape[1]).reciprocal_().mul_(shares).argmax(-1)


def philox(counters: Sequence[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox4x32-10: four 32-bit words per counter of four words, as int64 tensors.

    Args:
        counters: Four int64 tensors with values below 2**32 that broadcast to one shape.
        key: Two 32-bit words.
    """
    a, b, c, d = torch.broadcast_tensors(*counters)
    # In place, and two words at a time: on CPUs the overhead of small operations dominates.
    factors, left = torch.stack([a, c]), torch.stack([d, b])
    products = torch.empty_like(factors)
    shape = (2, *[1] * a.dim())
    usual, steps = (
        torch.tensor(pair, device=a.device).view(shape) for pair in (MULTIPLIERS, KEY_STEPS[::-1])
    )
    words = torch.tensor([key[1] & WORD, key[0] & WORD], device=a.device).view(shape)
    for number in range(ROUNDS):
        # `factors` alternates between (a, c) and (c, a), and `left` between (d, b) and (b, d).
        turned = number % 2
        torch.mul(factors, usual.flip(0) if turned else usual, out=products)  # int64 wraps
        torch.bitwise_right_shift(products, 32, out=factors).bitwise_and_(WORD)
        factors.bitwise_xor_(left).bitwise_xor_(words.flip(0) if turned else words)
        torch.bitwise_and(products[0], WORD, out=left[1])
        torch.bitwise_and(products[1], WORD, out=left[0])
        words = (words + steps).bitwise_and_(WORD)
    (a, c), (d, b) = factors, left
    return [a, b, c, d]
