"""A batch of rows of one model between two tokens, with its cache.

Rows are aligned at their last token: padding on the left is masked, and positions start at the
first token of each row.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from finetune.checkpoints.stop_tokens import network_of
from finetune.data.images.image_file import PlacedImage
from finetune.data.images.inputs import ImageInputs
from finetune.models.load_checks import context_length
from finetune.models.packed_attention import DOCUMENTS
from finetune.planner.estimate.sampling_cost import ROOM
from finetune.process.attributes import changed

if TYPE_CHECKING:
    from finetune.distributed.base import Engine

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest row of a batch (transformers 5.23)."""
FORBIDDEN = -1e4
"""Logit of a token that stands for an image: no temperature of a request makes it likely, and it is
finite in fp16."""
JOINABLE = {"full_attention", "sliding_attention"}
"""Types of layers whose only state is keys and values, masked by position."""


def can_join(model: nn.Module) -> bool:
    """Whether rows of different lengths can join a batch of this model without side effects.

    False for models with recurrent state, and for models whose rotary embeddings depend on the
    longest row.
    """
    network: Any = network_of(model)
    config = network.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in LENGTH_DEPENDENT for each in ropes):
        return False
    if not set(getattr(config, "layer_types", None) or ()) <= JOINABLE:
        return False
    if getattr(network, "_is_stateful", False):
        return False
    if not {"attention_mask", "past_key_values"} <= _arguments(network):
        return False
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def _arguments(network: nn.Module) -> set[str]:
    """Names of the arguments of a model, also of the class below one that adds a loss to it."""
    kinds = [kind for kind in type(network).__mro__ if "forward" in vars(kind)]
    return {name for kind in kinds for name in inspect.signature(kind.forward).parameters}


class Forward:
    """The forward pass of a model with a cache, called with the arguments that the model has."""

    def __init__(
        self,
        model: nn.Module,
        joins: bool,
        engine: "Engine | None" = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        """See `decode` for the other arguments.

        Args:
            joins: Whether the cache must keep all tokens, so that rows can join.
        """
        network: Any = network_of(model)
        self.inputs, self._dtype = inputs, network.dtype
        self._in_space = inputs is not None and inputs.positions is not None
        self._forbidden = None if inputs is None else torch.from_numpy(inputs.processor.token_ids)
        takes = _arguments(network)
        self.joins = joins
        self.device = next(model.parameters()).device if engine is None else engine.device
        self._run: Callable[..., Any] = model if engine is None else engine.model
        self._named = "cache_params" if "cache_params" in takes else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positioned = "position_ids" in takes
        context = context_length(network.config)
        self._last_place = None if context is None else context - 1

    def __call__(
        self, ids: torch.Tensor, batch: "Batch", images: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Read `ids` (rows, tokens), the last tokens of a batch, and set its cache and logits.

        Args:
            images: Inputs for the images among them.
        """
        given: dict[str, Any] = dict(self._last_only)
        # Models that are recurrent throughout read each position once, with its mask.
        read = batch.cache is not None and self._named == "cache_params"
        if any(batch.padding) and not read:
            places = torch.arange(batch.width, device=self.device)
            given["attention_mask"] = (places >= batch.starts).long()  # (rows, width)
        if self._positioned:
            places = torch.arange(batch.width - ids.shape[1], batch.width, device=self.device)
            # Rows that have ended but not left may be longer than the context.
            own = (places - batch.starts).clamp(0, self._last_place)
            in_space = own + batch.shifts if self._in_space else own
            given["position_ids"] = torch.stack([own, *[in_space] * 3]) if self._in_space else own
        given |= images or {}
        if batch.cache is not None:
            given[self._named] = batch.cache
        output = self._run(input_ids=ids, use_cache=True, **given)
        batch.cache, batch.logits = output[self._named], output.logits[:, -1]
        if self._forbidden is not None:
            batch.logits[:, self._forbidden] = FORBIDDEN

    def of_images(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs on the device of the model, pixels in its precision."""
        return {
            name: value.to(self.device, self._dtype if value.is_floating_point() else None)
            for name, value in values.items()
        }


class Batch:
    """Rows of one model between two tokens.

    Attributes:
        logits: (rows, vocabulary) for the next token of each row.
        width: Tokens of each row, including its padding.
        padding: Tokens of padding on the left of each row.
        starts: (rows, 1) int64, `padding` on the device of the model.
        shifts: (rows, 1) int64, what images in a row add to the places of its later tokens in time,
            height and width; 0 for models without such positions.
    """

    def __init__(
        self,
        forward: Forward,
        prompts: Sequence[Sequence[int]],
        pad: int,
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> None:
        """Run the model on prompts, with their images if any, in a single forward pass."""
        self._forward = forward
        # Without a config every layer keeps all tokens.
        self.cache: Any = DynamicCache() if forward.joins else None
        self.logits = torch.empty(0)
        self.width = max(map(len, prompts))
        self._pad([self.width - len(prompt) for prompt in prompts])
        ids = [[pad] * (self.width - len(prompt)) + list(prompt) for prompt in prompts]
        self.shifts = torch.zeros_like(self.starts)
        seen = self._images(forward.inputs, prompts, images, ids) if any(images) else {}
        forward(torch.tensor(ids, device=forward.device), self, forward.of_images(seen))
        layers = self.cache.layers
        layers[:] = [GrowingLayer.of(e) if type(e) is DynamicLayer else e for e in layers]

    def __len__(self) -> int:
        return len(self.padding)

    def _images(
        self,
        inputs: ImageInputs | None,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[PlacedImage]],
        ids: list[list[int]],
    ) -> dict[str, torch.Tensor]:
        """Inputs for the images of prompts with padded `ids`; sets `shifts`."""
        assert inputs is not None, "a prompt has images, and the model reads text only"
        found = inputs.tensors(images, is_filled=False)
        if inputs.positions is not None:
            documents = zip(map(np.array, prompts), map(len, images), strict=True)
            placed = inputs.document_positions(documents, found)[:, 0]  # (4, tokens of all)
            parts = placed.split(list(map(len, prompts)), dim=1)
            ends = [[int(part[1:].max()) + 1 - part.shape[1]] for part in parts]
            self.shifts = torch.tensor(ends, device=self.starts.device)
            padded = [nn.functional.pad(part, (self.width - part.shape[1], 0)) for part in parts]
            found["position_ids"] = torch.stack(padded, dim=1)
        if inputs.token_types is not None:
            found[inputs.token_types] = torch.from_numpy(inputs.types(np.array(ids)))
        return found

    def _pad(self, padding: list[int]) -> None:
        self.padding = padding
        self.starts = torch.tensor(padding, device=self._forward.device)[:, None]

    def advance(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        self.width += 1
        self._forward(torch.tensor(tokens, device=self._forward.device)[:, None], self)

    def keep(self, rows: Sequence[int]) -> None:
        """Select rows by index; an index may occur several times.

        The padding that all of them have is removed, if every layer has all tokens.
        """
        padding = [self.padding[row] for row in rows]
        common = min(padding) if self._forward.joins else 0
        self.width -= common
        self._pad([number - common for number in padding])
        chosen = torch.tensor(rows, device=self.logits.device)
        self.shifts = self.shifts[chosen]
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.keep(chosen, common)
            else:
                layer.reorder_cache(chosen)  # windows, and states of recurrences
        self.logits = self.logits[chosen]

    def join(self, *others: "Batch") -> None:
        """Append rows of the same model."""
        if not others:
            return
        layers = [self.cache.layers, *(each.cache.layers for each in others)]
        for mine, *theirs in zip(*layers, strict=True):
            if mine.is_initialized:
                mine.keys = _below([mine.keys, *(each.keys for each in theirs)])
                mine.values = _below([mine.values, *(each.values for each in theirs)])
        parts = [self, *others]
        width = max(each.width for each in parts)
        self._pad([width - each.width + number for each in parts for number in each.padding])
        self.width = width
        self.logits = torch.cat([each.logits for each in parts])
        self.shifts = torch.cat([each.shifts for each in parts])


class GrowingLayer(DynamicLayer):
    """A cache layer with spare capacity, so that appending a token does not copy the others."""

    @classmethod
    def of(cls, layer: DynamicLayer) -> "GrowingLayer":
        """The same keys and values."""
        growing = cls()
        growing.__dict__.update(layer.__dict__)
        return growing

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = _appended(self.keys, key_states)
        self.values = _appended(self.values, value_states)
        return self.keys, self.values

    def keep(self, rows: torch.Tensor, cut: int) -> None:
        """Select rows, without their first `cut` tokens."""
        if self.is_initialized:
            self.keys = _below([self.keys[rows, :, cut:]])
            self.values = _below([self.values[rows, :, cut:]])


def _appended(cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` appended to `cached`, in place if the memory of `cached` has room.

    Both are (rows, heads, tokens, head size).
    """
    before, after = cached.shape[-2], cached.shape[-2] + new.shape[-2]
    buffer = _whole(cached)
    if buffer.shape[-2] < after:
        buffer = cached.new_empty(*cached.shape[:2], after + ROOM, cached.shape[-1])
        buffer[:, :, :before] = cached
    buffer[:, :, before:after] = new
    return buffer[:, :, :after]


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenated rows of all parts, aligned at the end, with room for more tokens.

    All are (rows, heads, tokens, head size).
    """
    width, first = max(each.shape[2] for each in parts), parts[0]
    shape = (sum(map(len, parts)), first.shape[1], width + ROOM, first.shape[3])
    buffer, row = first.new_empty(shape), 0
    for each in parts:
        rows, padding = buffer[row : row + len(each)], width - each.shape[2]
        rows[:, :, :padding] = 0  # masked values are multiplied by 0, so they must be finite
        rows[:, :, padding:width] = each
        row += len(each)
    return buffer[:, :, :width]


def _whole(cached: torch.Tensor) -> torch.Tensor:
    """The tensor that `cached` is a view of, else `cached`: (rows, heads, tokens, head size).

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


@contextlib.contextmanager
def cached_attention(model: nn.Module) -> Iterator[None]:
    """Context manager that replaces the `documents` attention, which does not support a cache."""
    network: Any = network_of(model)
    config = network.config.get_text_config()
    if config._attn_implementation != DOCUMENTS:
        yield
        return
    cached = "sdpa" if network._supports_sdpa else "eager"
    with changed(config, _attn_implementation=cached):
        yield
