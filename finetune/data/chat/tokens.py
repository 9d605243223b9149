"""Token ids of a text, and where its characters and its images are among them."""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.data.chat.template_spans import Span
from finetune.data.images.image_file import ImageFile, PlacedImage
from finetune.data.images.processor import Expanded

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class Row:
    """Token ids of a sequence, and which of them are trained."""

    ids: list[int]
    trained: list[bool]
    notes: frozenset[str] = frozenset()
    """Unusual properties, by the names in `finetune.data.tally.COUNTED`."""
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens, in order."""

    def __post_init__(self) -> None:
        """No token of an image is trained, whatever is: it is not written, it is read."""
        for image in self.images:
            self.trained[image.start : image.end] = [False] * (image.end - image.start)


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text."""

    ids: list[int]
    encoding: "Encoding"

    @property
    def offsets(self) -> list[Span]:
        """The character span of each token."""
        return self.encoding.offsets

    def place(self, span: Span, ends: Collection[int | None]) -> Span | None:
        """Token range of a span that begins and ends at token borders and ends with one of `ends`.

        None if the tokens at its ends do not show this; then all tokens are searched.
        """
        start, end = span
        encoding = self.encoding
        if start >= end or start == 0:
            return None
        before, first = encoding.char_to_token(start - 1), encoding.char_to_token(start)
        last = encoding.char_to_token(end - 1)
        if before is None or first != before + 1 or last is None:
            return None
        if encoding.token_to_chars(first)[0] != start or encoding.token_to_chars(last)[1] != end:
            return None
        return (first, last + 1) if self.ids[last] in ends else None


def half_character(text: str) -> str:
    """The first unpaired surrogate of a text; empty if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def placed_images(
    files: tuple[ImageFile, ...],
    expanded: Expanded,
    tokens: Tokens,
    offsets: list[Span] | None = None,
) -> tuple[PlacedImage, ...]:
    """The images of a text among its tokens; `offsets` are their spans if not those of `tokens`."""
    if not files:
        return ()
    starts = [start for start, _ in offsets or tokens.offsets]
    placed = list[PlacedImage]()
    for file, (first, end), digest in zip(files, expanded.after, expanded.digests, strict=True):
        # The token that a character belongs to is the last one that begins at or before it.
        place = bisect_right(starts, first) - 1, bisect_right(starts, end - 1)
        placed.append(PlacedImage(*place, file, digest))
    return tuple(placed)
