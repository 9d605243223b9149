"""An image of a row: a file or the bytes in the row, and how it is decoded.

In the text of a message each image is one `PLACE`; `message["images"]` has the images in order.
"""

import base64
import hashlib
import io
import mimetypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.values import RowProblem, kind_of
from finetune.errors import FinetuneError, first_line
from finetune.version import install

if TYPE_CHECKING:
    from PIL import Image

PLACE = "\ufffc"
"""Stands for an image in the text of a message: Unicode's object replacement character."""
SHOWN = 96
"""Maximum width and height of a thumbnail in pixels."""
WRITTEN = re.compile(r"\n?<image>\n?")
"""How LLaVA, LLaMA-Factory and ms-swift write the place of an image into a text."""
EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK",
                        "YCbCr", "HSV", "LAB"))  # fmt: skip
"""Modes of Pillow with 8 bits or fewer per channel; it would cut others to white."""


@dataclass(frozen=True)
class ImageFile:
    """A compressed image: the path of its file, or its bytes."""

    path: str | None = None
    data: bytes | None = None

    @property
    def name(self) -> str:
        """How errors call it."""
        return "the image in the row" if self.path is None else f"image '{self.path}'"

    def read(self) -> bytes:
        """The compressed bytes.

        Raises:
            RowProblem: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return Path(self.path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            reason = error.strerror if isinstance(error, OSError) else error
            raise RowProblem(f"{self.name} cannot be read: {reason}") from None

    def within(self, folder: Path) -> "ImageFile":
        """The same file, whose relative path starts in a folder."""
        return (
            self if self.path is None else replace(self, path=str((folder / self.path).absolute()))
        )


@dataclass(frozen=True)
class PlacedImage:
    """An image among the tokens of a document."""

    start: int
    """Index of the first of its tokens."""
    end: int
    """Index behind the last one."""
    file: ImageFile
    digest: str
    """Hash of the compressed bytes, in hexadecimal."""


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def image_of(value: Any, where: str) -> ImageFile:
    """The image that a row names: a path, a `data:` URL, bytes, or an object that has one of them.

    Raises:
        RowProblem: it is something else, or a web address.
    """
    match value:
        case bytes() if value:
            return ImageFile(data=value)
        case {"bytes": bytes() as data} if data:  # an image of `datasets`
            return ImageFile(data=data)
        case {"path": str() as inner} | {"url": str() as inner} | {"image": str() as inner}:
            return image_of(inner, where)
        case str() if value.startswith("data:"):
            head, _, text = value.partition(",")
            try:
                if head.endswith(";base64"):
                    return ImageFile(data=base64.b64decode(text, validate=True))
            except ValueError:
                pass
            raise RowProblem(f"{where} is a data: URL whose content is not base64")
        case str() if re.match(r"[a-z][a-z0-9+.]+://", value) and not value.startswith("file://"):
            raise RowProblem(
                f"{where} is a web address ({value[:80]}), and a training must not depend on a "
                "server; download the image and name its file"
            )
        case str() if value.strip():
            return ImageFile(path=value.removeprefix("file://"))
        case _:
            raise RowProblem(
                f"{where} is {kind_of(value)}, expected the path of an image, its bytes, or a "
                "data: URL"
            )


def with_images(
    messages: tuple[dict[str, Any], ...], row: Mapping[str, Any]
) -> tuple[dict[str, Any], ...]:
    """Messages whose places have their images: those of the row's columns `images` and `image`.

    Raises:
        RowProblem: the row has more or fewer images than places.
    """
    beside = list[ImageFile]()
    for name in ("images", "image"):
        value = row.get(name)
        listed = (
            value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
        )
        beside += [
            image_of(each, f"{name}[{number}]")
            for number, each in enumerate(listed)
            if each is not None and each != ""
        ]
    if beside and not any(message.get("images") for message in messages):
        messages = tuple(map(_with_written_places, messages))
    there = [each for message in messages for each in message.get("images", ())]
    if there.count(None) != len(beside):
        raise RowProblem(
            f"its turns have {there.count(None)} places for images that name no file, and its "
            f"columns images and image have {len(beside)} images; give each place its image"
        )
    if not there:
        return messages
    for number, message in enumerate(messages):
        if "images" in message and message["content"].count(PLACE) != len(message["images"]):
            raise RowProblem(f"the text of message {number} contains U+FFFC, the place of an image")
    rest = iter(beside)
    return tuple(
        {**each, "images": tuple(next(rest) if one is None else one for one in each["images"])}
        if "images" in each
        else each
        for each in messages
    )


def _with_written_places(message: dict[str, Any]) -> dict[str, Any]:
    """A turn of the user whose `<image>` is the place of an image, with line breaks beside it."""
    if message["role"] != "user":
        return message
    content, count = WRITTEN.subn(PLACE, message["content"])
    return {**message, "content": content, "images": (None,) * count} if count else message


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a chat template reads it: its content as parts of text and images."""
    parts = list[dict[str, str]]()
    pieces = message["content"].split(PLACE) if "images" in message else [message["content"]]
    for number, piece in enumerate(pieces):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece or len(pieces) == 1 else []
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


def data_url(file: ImageFile) -> str:
    """The compressed bytes as a `data:` URL; readers find their format in the bytes.

    Raises:
        RowProblem: the file cannot be read.
    """
    kind, _ = mimetypes.guess_type(file.path or "")
    return f"data:{kind or 'image/png'};base64,{base64.b64encode(file.read()).decode()}"


def thumbnail(file: ImageFile) -> str:
    """A `data:` URL of the image with at most `SHOWN` pixels a side, for pages of users.

    Raises:
        RowProblem: it cannot be decoded.
    """
    image, _ = decode(file.read(), file.name)
    is_small = max(image.size) <= SHOWN
    image.thumbnail((SHOWN, SHOWN))
    kind, buffer = ("png" if is_small else "jpeg"), io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def decode(data: bytes, name: str) -> tuple["Image.Image", frozenset[str]]:
    """An upright RGB image, and notes by the names in `finetune.data.tally.COUNTED`.

    Transparent pixels become white, as vLLM shows them; transformers would drop alpha only.

    Raises:
        RowProblem: it cannot be decoded, or not without a choice that nobody made.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise FinetuneError(f"model.reads: images need Pillow: {install('images')}") from None
    limit = Image.MAX_IMAGE_PIXELS
    try:
        opened = Image.open(io.BytesIO(data))
        width, height = opened.size
        if limit is not None and width * height > limit:
            raise RowProblem(f"{name} has {width} x {height} pixels, more than {limit:,}; scale it")
        # Phones write a second picture behind a photo (MPO), which no viewer shows.
        if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":
            raise RowProblem(f"{name} has {opened.n_frames} frames; save the one that is meant")
        if opened.mode not in EIGHT_BITS:
            raise RowProblem(
                f"{name} has more than 8 bits per channel (mode {opened.mode}), which would be cut "
                "off; convert it to 8 bits"
            )
        image = ImageOps.exif_transpose(opened)
        notes = {"images_rotated"} if opened.getexif().get(0x0112, 1) != 1 else set[str]()
        if image.has_transparency_data:
            notes.add("images_transparent")
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB"), frozenset(notes)
    except (RowProblem, MemoryError):
        raise
    except Exception as error:  # a damaged file raises whatever its decoder happens to raise
        known: dict[type[Exception], str] = {
            UnidentifiedImageError: "Pillow does not know its format",
            Image.DecompressionBombError: f"it has more than {2 * (limit or 0):,} pixels; scale it",
        }
        reason = known.get(type(error)) or first_line(error)
        raise RowProblem(f"{name} cannot be decoded: {reason}") from None
