"""Images of a traced step, and the values that a tower reads from its inputs.

A tower reads the sizes of images and which of its inputs are padding. These follow from the inputs
alone, not from weights: operations on nothing but inputs are computed, all others are traced.
"""

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.checks.images import seen
from finetune.data.images.image_file import ImageFile, PlacedImage, digest_of
from finetune.data.images.processor import SMALLEST, ImageProcessor, Size
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.models.image_parts import image_inputs
from finetune.models.model import load_chat_of
from finetune.recipe import Recipe

LARGEST = 8_192
"""Width and height in pixels of an image that a processor makes as large as it makes any."""
COUNTED = (torch.int64, torch.int32, torch.bool)
"""Data types of new tensors that have values: places, sizes and masks."""
aten: Any = torch.ops.aten


class Pictured(NamedTuple):
    """Rows of a traced micro-batch."""

    ids: torch.Tensor  # (rows, tokens) int64
    images: Mapping[str, torch.Tensor]
    """Inputs for the images, by their names in transformers."""
    tokens: int
    """Tokens that features replace."""


def pictured_rows(recipe: Recipe, rows: int, length: int) -> Pictured:
    """Rows with as many of the largest image as fit into them, and untrained tokens behind.

    The image is as large as the largest one in the first rows of the data that fits; without
    data or one that fits, as large as the processor makes any, or the largest of half, a quarter,
    ... its sides that fits.

    Raises:
        FinetuneError: none fits.
    """
    processor = load_chat_of(recipe).images
    assert processor is not None
    size, ids = _largest(recipe, processor, length)
    count = length // (len(ids) + 1)
    if count > 1:
        ids = _ids(processor, size, alone=False)
    row = np.zeros(length, np.int64)
    for number in range(count):
        first = number * (len(ids) + 1)  # two images are never beside one another
        row[first : first + len(ids)] = ids
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, (90, 120, 150)).save(buffer, "png")  # black could be taken for padding
    file = ImageFile(data=buffer.getvalue())
    placed = PlacedImage(0, 0, file, digest_of(buffer.getvalue()))
    inputs = image_inputs(recipe.model, processor, alone=True)
    assert inputs is not None
    found = processor.tensors([[placed] * count] * rows)
    both = np.tile(row, (rows, 1))
    if inputs.token_types is not None:
        found[inputs.token_types] = torch.from_numpy(inputs.types(both))
    return Pictured(torch.from_numpy(both), found, int(inputs.types(both).sum()))


def _largest(recipe: Recipe, processor: ImageProcessor, length: int) -> tuple[Size, np.ndarray]:
    """The size of the image of a traced step, and the tokens that stand for it."""
    found = list[tuple[int, Size]]()
    with contextlib.suppress(FinetuneError, RowProblem, OSError):
        for data in recipe.data[:1]:
            found += [(each.tokens, each.size) for row in seen(data, processor) for each in row]
    sizes = [size for _, size in sorted(found, reverse=True)]
    sides = [LARGEST >> halved for halved in range(LARGEST.bit_length())]
    for size in [*dict.fromkeys(sizes), *((side, side) for side in sides if side >= SMALLEST)]:
        with contextlib.suppress(RowProblem):
            ids = _ids(processor, size, alone=True)
            if len(ids) < length:
                return size, ids
    raise FinetuneError(
        f"--verify: batch.max_length={length}: the smallest image has more tokens; set a larger one"
    )


def _ids(processor: ImageProcessor, size: Size, alone: bool) -> np.ndarray:
    text = processor.text_of(size, alone, "the image of a traced step")
    return np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)


class KnownValues(TorchDispatchMode):
    """Computes operations whose tensors are no fake ones, as they follow from inputs alone."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(each, FakeTensor) for each in tensors):
            rule = BY_VALUE.get(func)
            return func(*map(_as_places, args), **given) if rule is None else rule(*args)
        if not tensors:
            made = func(*args, **given)
            counts = isinstance(made, torch.Tensor) and made.dtype in COUNTED
            if not counts and func._schema.name not in ("aten::arange", "aten::linspace"):
                return made
        with unset_fake_temporarily():
            return func(*args, **given)


def _as_places(value: Any) -> Any:
    """Arguments in which a list of indices has places for a mask."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for each in value:
        if isinstance(each, torch.Tensor) and _is_known_mask(each):
            with unset_fake_temporarily():
                found += each.nonzero(as_tuple=True)
        else:
            found.append(each)
    return found


def _is_known_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool and not isinstance(tensor, FakeTensor)


def _selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():
        count = int(mask.expand(values.shape).sum())
    return values.new_empty((count,))


def _unscattered(grad: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return _selected(grad, mask).view(sizes)


BY_VALUE: dict[Any, Callable[..., torch.Tensor]] = {
    aten.masked_select.default: _selected,
    aten.masked_scatter_backward.default: _unscattered,
}
"""Operations whose result has a shape that follows from the values of a mask."""
