"""What images cost a recipe: parts of its model, tokens and pixels of its rows, decoding."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from finetune.data.formats import read_row
from finetune.data.images.image_file import ImageFile, PlacedImage, digest_of
from finetune.data.images.processor import ImageProcessor
from finetune.data.read.sources import find_source
from finetune.data.samples import Conversation, sequences_of, with_files_in
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.models.image_parts import config_of, sizes, without_weights
from finetune.models.model import load_chat_of
from finetune.recipe import Data, Recipe
from finetune.runs import units

LOOKED_AT = 1_000
"""Rows of a recipe's first source whose images are counted; headers of files are read."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """Images of rows."""

    file: ImageFile
    size: tuple[int, int]
    """Width and height in pixels."""
    tokens: int


def planned(recipe: Recipe) -> Iterator[str]:
    """Lines below a plan, for a model that reads images; none of what cannot be loaded here."""
    with contextlib.suppress(FinetuneError, RowProblem, OSError):
        yield from _parts(recipe)
    with contextlib.suppress(FinetuneError, RowProblem, OSError):
        yield from _rows(recipe)


def _parts(recipe: Recipe) -> Iterator[str]:
    counts = sizes(without_weights(config_of(recipe.model)))
    told = ", ".join(
        f"{name} {count:,}{' (trained)' if name in recipe.model.trains else ''}"
        for name, count in counts.items()
    )
    yield f"parts        {told} parameters"


def _rows(recipe: Recipe) -> Iterator[str]:
    processor = load_chat_of(recipe).images
    if processor is None or not recipe.data:
        return
    rows = [*seen(recipe.data[0], processor)]
    images = [each for row in rows for each in row]
    if not images:
        return
    counts = [len(row) for row in rows]
    tokens = [sum(each.tokens for each in row) for row in rows]
    yield (
        f"images       {sum(map(bool, counts)):,} of the first {len(rows):,} rows, {min(counts)} "
        f"to {max(counts)} each; {round(sum(tokens) / len(rows)):,} tokens in a mean row, at most "
        f"{max(tokens):,}"
    )
    largest = max(images, key=lambda each: each.tokens)
    placed = PlacedImage(0, 0, largest.file, digest_of(largest.file.read()))
    processor.tensors([[placed]])  # the first call also makes what later ones share
    began = time.process_time()
    tensors = processor.tensors([[placed]])
    seconds = time.process_time() - began
    pixels = sum(each.numel() * each.element_size() for each in tensors.values())
    width, height = largest.size
    yield (
        f"             the largest, {largest.file.name}, {width} x {height}: {largest.tokens:,} "
        f"tokens, {units.size(pixels)} of pixels, {1e3 * seconds:.0f} ms of a core to decode"
    )
    step = recipe.batch.rows * len(images) / len(rows)
    yield (
        f"             a step decodes {step:.3g} images: at most {seconds * step:.2g} s of a core, "
        "in the background"
    )


def seen(data: Data, processor: ImageProcessor) -> Iterator[list[Seen]]:
    """The images of the first rows that can be read."""
    for row in islice(find_source(data).rows(), LOOKED_AT):
        with contextlib.suppress(RowProblem, OSError):
            sample = read_row(data.format, row.value)
            if sample is None:
                continue
            first, *_ = sequences_of(with_files_in(sample, Path(row.file).parent))
            files = first.images if isinstance(first, Conversation) else ()
            sizes = [_size(each) for each in files]
            yield [
                Seen(file, size, processor.tokens_of(size, len(files) == 1, file.name))
                for file, size in zip(files, sizes, strict=True)
            ]


def _size(file: ImageFile) -> tuple[int, int]:
    """Width and height of an upright image, from the header of its file."""
    from PIL import Image

    with Image.open(io.BytesIO(file.read())) as image:
        width, height = image.size
        is_turned = image.getexif().get(0x0112, 1) > 4
    return (height, width) if is_turned else (width, height)
