"""Continuous batching: rows join the batch after their prompt, and leave it at their end.

Rows are aligned at their last token. The answer of a row does not depend on other rows: padding is
masked, positions start at the first token of each row, and each row has its own noise. Logits
differ only by rounding, because matrix products of several rows add in another order.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from finetune.inference.sampling import GrowingLayer

ROOM = 64
"""Tokens by which the cache of keys and values grows: each time it is copied."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest row of a batch (transformers 5.23)."""
SHAREABLE = {"full_attention", "sliding_attention"}
"""Types of layers whose only state is keys and values, masked by position."""

TINY = torch.finfo(torch.float64).tiny


def can_share(model: Any) -> bool:
    """Whether rows of different lengths can share a cache of this model without side effects.

    False for models with recurrent state, where padding cannot be masked, and for models whose
    rotary embeddings depend on the longest row.
    """
    network = model.get_base_model() if isinstance(model, PeftModel) else model
    config = network.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in LENGTH_DEPENDENT for each in ropes):
        return False
    if not set(getattr(config, "layer_types", None) or ()) <= SHAREABLE:
        return False
    if getattr(network, "_is_stateful", False):
        return False
    taken = inspect.signature(network.forward).parameters
    if not {"attention_mask", "past_key_values"} <= set(taken):
        return False
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


class Rows:
    """A batch of rows of one model, between two tokens.

    Attributes:
        logits: (rows, vocabulary) for the next token of each row.
        lengths: (rows,) tokens of each row.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], pad: int) -> None:
        """Run the model on prompts in a single forward pass.

        Args:
            model: Model for which `can_share` is true.
            prompts: Token ids of each prompt, at least one.
            pad: Any token id, for the masked padding on the left.
        """
        network = model.get_base_model() if isinstance(model, PeftModel) else model
        taken = inspect.signature(network.forward).parameters
        self.model = model
        self._positioned = "position_ids" in taken
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._cache: Any = DynamicCache()  # without a config every layer keeps all tokens
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(self.lengths.max())
        ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        self.logits = self._forward(torch.tensor(ids), self.lengths)
        for layer in self._cache.layers:
            if type(layer) is DynamicLayer and layer.is_initialized:
                layer.__class__ = RoomyLayer

    def __len__(self) -> int:
        return len(self.lengths)

    def join(self, *others: "Rows") -> None:
        """Append rows of the same model."""
        if not others:
            return
        layers = [self._cache.layers, *(each._cache.layers for each in others)]
        for mine, *theirs in zip(*layers, strict=True):
            if mine.is_initialized:
                mine.keys = _below([mine.keys, *(each.keys for each in theirs)])
                mine.values = _below([mine.values, *(each.values for each in theirs)])
        self.lengths = torch.cat([self.lengths, *(each.lengths for each in others)])
        self.logits = torch.cat([self.logits, *(each.logits for each in others)])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, at least one, and trim their common padding."""
        chosen = torch.tensor(rows)
        self.lengths = self.lengths[chosen]
        width = int(self.lengths.max())
        moved = chosen.to(self.logits.device)
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys = _last_tokens(layer.keys, moved, width)
                layer.values = _last_tokens(layer.values, moved, width)
        self.logits = self.logits[moved]

    def advance(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        self.lengths = self.lengths + 1
        self.logits = self._forward(torch.tensor(tokens)[:, None], self.lengths)

    def _forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits of the next token of each row; `lengths` includes the tokens of `ids`."""
        device, width = self.model.device, int(lengths.max())
        given: dict[str, Any] = dict(self._last_only)
        if bool((lengths != width).any()):
            mask = torch.arange(width) >= (width - lengths)[:, None]  # (rows, width)
            given["attention_mask"] = mask.long().to(device)
        if self._positioned:
            places = torch.arange(width - ids.shape[1], width) - (width - lengths)[:, None]
            given["position_ids"] = places.clamp(0).to(device)
        output = self.model(
            input_ids=ids.to(device), past_key_values=self._cache, use_cache=True, **given
        )
        return output.logits[:, -1]


class RoomyLayer(GrowingLayer):
    """A cache layer that grows by more tokens, as several rows share it."""

    room = ROOM


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenated rows of all parts, aligned at the end: (rows, heads, tokens, head size)."""
    width = max(each.shape[2] for each in parts)
    first = parts[0]
    shape = (sum(map(len, parts)), first.shape[1], width + ROOM, first.shape[3])
    buffer = first.new_empty(shape)
    row = 0
    for each in parts:
        rows, padding = buffer[row : row + len(each)], width - each.shape[2]
        rows[:, :, :padding] = 0  # masked values are multiplied by 0, so they must be finite
        rows[:, :, padding:width] = each
        row += len(each)
    return buffer[:, :, :width]


def _last_tokens(cached: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """The last `width` tokens of the given rows: (rows, heads, width, head size)."""
    buffer = cached.new_empty(len(rows), cached.shape[1], width + ROOM, cached.shape[3])
    buffer[:, :, :width] = cached[rows, :, cached.shape[2] - width :]
    return buffer[:, :, :width]


class Draw:
    """Samples the tokens of one row, with noise that depends only on its seed."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        """With `temperature` 0 the most likely token is selected."""
        self.temperature, self.top_p = temperature, top_p
        self._noise = torch.Generator()  # on the CPU: the same noise for every device
        self._noise.manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token, from logits (vocabulary,).

        The token with the largest probability / exponential noise is a sample from the
        probabilities. With `top_p` below 1, only the smallest set of most likely tokens with at
        least that total probability is considered.
        """
        if not self.temperature:
            return int(logits.argmax())
        shares = (logits.float() / self.temperature).softmax(-1)
        if self.top_p < 1:
            falling, order = shares.sort(descending=True)
            before = falling.cumsum(-1) - falling
            shares[order[before >= self.top_p]] = 0
        uniform = torch.rand(len(shares), generator=self._noise, dtype=torch.float64)
        noise = uniform.neg_().add_(1).log_().neg_().clamp_min_(TINY).to(shares.device)
        return int((shares / noise).argmax())
