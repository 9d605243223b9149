"""Store which images documents have, and where: tokens and places, never pixels.

images.npy    (images, 4) int32: document, first token, token behind the last one, file
images.json   each file once: its digest, and its path, size and time, or its place in images.bin
images.bin    concatenated compressed images that were inside of rows
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from finetune.data.images.image_file import ImageFile, PlacedImage, digest_of
from finetune.data.images.processor import changed
from finetune.errors import refuse

PLACES, LISTED, BYTES = "images.npy", "images.json", "images.bin"


@dataclass(frozen=True)
class Stored:
    """A file of images: where its bytes are."""

    digest: str
    path: str | None = None
    offset: int = 0
    """First byte in images.bin, if it has no path."""
    size: int = 0
    """Bytes."""
    time: int = 0
    """Time of the last change of the file with the path, in nanoseconds."""


@dataclass(frozen=True)
class Images:
    """The images of documents."""

    places: np.ndarray  # (images, 4) int32, by document and token
    files: Sequence[Stored]
    data: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))  # (bytes,) uint8

    @classmethod
    def of_lists(cls, images: Sequence[Sequence[PlacedImage]]) -> "Images":
        """The images of documents in memory."""
        files, parts, size = list[Stored](), list[bytes](), 0
        places = list[tuple[int, int, int, int]]()
        for document, of_document in enumerate(images):
            for each in of_document:
                inside = each.file.data or b""
                places.append((document, each.start, each.end, len(files)))
                files.append(Stored(each.digest, each.file.path, size, len(inside)))
                parts.append(inside)
                size += len(inside)
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        return cls(np.array(places, dtype=np.int32).reshape(-1, 4), files, data)

    def of(self, document: int) -> list[PlacedImage]:
        """The images of a document, in the order of its tokens."""
        first, behind = np.searchsorted(self.places[:, 0], [document, document + 1])
        return [self._placed(*map(int, place)) for place in self.places[first:behind]]

    def _placed(self, _: int, start: int, end: int, number: int) -> PlacedImage:
        file = self.files[number]
        inside = self.data[file.offset : file.offset + file.size].tobytes()
        found = ImageFile(data=inside) if file.path is None else ImageFile(path=file.path)
        return PlacedImage(start, end, found, file.digest)

    def digests(self, documents: np.ndarray) -> bytes:
        """What the content of rows with these documents depends on, besides their tokens."""
        kept = self.places[np.isin(self.places[:, 0], documents)]
        return "".join(self.files[number].digest for number in kept[:, 3]).encode()

    def refuse_changed(self, folder: Path) -> None:
        """Refuse files that are not those that the documents were prepared from.

        Only a file with another size or time is read.

        Args:
            folder: Folder of the prepared rows.

        Raises:
            FinetuneError: with the names of the first ones.
        """
        problems = list[str]()
        for file in self.files:
            if file.path is None or _size_and_time(Path(file.path)) == (file.size, file.time):
                continue
            found = ImageFile(path=file.path)
            if not Path(file.path).is_file() or digest_of(found.read()) != file.digest:
                problems.append(changed(found.name, folder))
        refuse(problems[:10])


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class ImagesWriter:
    """Writes the images of documents to their folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = list[tuple[int, int, int, int]]()
        self._numbers = dict[tuple[str, str | None], int]()
        self._files = list[Stored]()
        self._data: IO[bytes] | None = None
        self._documents = 0

    def append(self, images: Iterable[Iterable[PlacedImage]]) -> None:
        """Append the images of the next documents."""
        for of_document in images:
            for each in of_document:
                number = self._number(each)
                self._places.append((self._documents, each.start, each.end, number))
            self._documents += 1

    def _number(self, image: PlacedImage) -> int:
        path = image.file.path
        known = self._numbers.get((image.digest, path))
        if known is not None:
            return known
        number = self._numbers[image.digest, path] = len(self._files)
        if path is not None:
            self._files.append(Stored(image.digest, path, 0, *(_size_and_time(Path(path)) or ())))
            return number
        if self._data is None:
            self._data = (self._folder / BYTES).open("wb")
        data = image.file.read()
        self._files.append(Stored(image.digest, None, self._data.tell(), len(data)))
        self._data.write(data)
        return number

    def close(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._files:
            np.save(self._folder / PLACES, np.array(self._places, dtype=np.int32))
            listed = [list(vars(each).values()) for each in self._files]
            (self._folder / LISTED).write_text(json.dumps(listed), encoding="utf-8")


def open_images(folder: Path) -> Images | None:
    """Open the images of the documents in a folder; None if there are none."""
    if not (folder / PLACES).is_file():
        return None
    files = [Stored(*each) for each in json.loads((folder / LISTED).read_text(encoding="utf-8"))]
    places = np.load(folder / PLACES)
    if not (folder / BYTES).is_file():
        return Images(places, files)
    return Images(places, files, np.memmap(folder / BYTES, dtype=np.uint8, mode="r"))
