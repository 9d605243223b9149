"""Read the files at an address: copied to the cache if they have changed there, or in place."""

import hashlib
import io
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from finetune.cache import cache
from finetune.errors import FinetuneError, first_line
from finetune.process.progress import progress
from finetune.runs.addresses import asking, file_system
from finetune.runs.run import write_json

VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "mtime",
)  # fmt: skip
"""What file systems of fsspec call the version of a file, the best one first."""
CHANGED = "{}: it has changed since it was listed; start again when no process writes to it"
KNOWN = ".versions.json"
"""The versions of the files in a folder of the cache, by name."""


def fetched(address: str) -> Path:
    """The local copy of a file, a folder or the files of a pattern.

    Args:
        address: Of a file system of fsspec; with `*`, the files that match.

    Raises:
        FinetuneError: there is no such file, or it cannot be read.
    """
    found = remote_files(address)
    folder = cache("sources") / hashlib.sha256(address.encode()).hexdigest()[:16]
    known: dict[str, Any] = _versions(folder)
    with progress(f"copying {address}", len(found), "files") as copied:
        for name, file in found.items():
            there = (folder / name).is_file() and known.get(name, [None])[0]
            if file.version is None or there != file.version:
                _copy(file, folder / name, address)
                known[name] = [file.version, (folder / name).stat().st_size]
                write_json(folder / KNOWN, known)
            copied(1)
    for name in known.keys() - found.keys():
        (folder / name).unlink(missing_ok=True)
        del known[name]
        write_json(folder / KNOWN, known)
    (name, *_) = found
    return folder / name if address.endswith(name) else folder


def _version(about: Mapping[str, Any]) -> str | None:
    return next((str(about[key]) for key in VERSIONS if about.get(key)), None)


def _versions(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / KNOWN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _copy(file: "RemoteFile", target: Path, address: str) -> None:
    files, path = file_system(file.address)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with asking(address, f"{target.name} cannot be read"):
            files.get_file(path, str(scratch))
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def versions(address: str) -> dict[str, Any]:
    """The version and size of each file of the copy, as they were when it was made."""
    return _versions(cache("sources") / hashlib.sha256(address.encode()).hexdigest()[:16])


# In place.


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address, which is read without a copy; it has what readers use of a `Path`."""

    address: str
    version: str | None
    """Its version there when it was listed, such as its ETag."""
    size: int | None
    """Bytes; None if the server does not tell."""

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        return PurePosixPath(self.address.partition("?")[0]).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the file for reading; a lost connection is opened again where it ended.

        Raises:
            FinetuneError: the file has changed since it was listed; while reading, that it ends
                early or cannot be read after several attempts.
        """
        assert mode == "rb"
        files, path = file_system(self.address)
        with asking(self.address, "cannot be read"):
            about = files.info(path)
        if (_version(about), about.get("size")) != (self.version, self.size):
            raise FinetuneError(CHANGED.format(self.address))
        return io.BufferedReader(_Remote(self, files, path), BLOCK)


BLOCK = 1 << 20
"""Bytes that are asked of a file system at a time; it reads further ahead itself."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each new try to read a file."""


class _Remote(io.RawIOBase):
    """The bytes of a file at an address."""

    def __init__(self, file: RemoteFile, files: Any, path: str) -> None:
        self._about, self._files, self._path = file, files, path
        self._at = 0
        self._open: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._about.size is not None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._about.size or 0}[whence]
        at = base + offset
        if at != self._at and self._open is not None:
            self._open.seek(at)
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        for wait in (*WAITS, None):
            try:
                data = self._read(len(buffer))
                break
            except Exception as error:  # of aiohttp, botocore, huggingface_hub, ...
                self._open = None
                if wait is None:
                    where = f"{self._about.address}: cannot be read after byte {self._at:,}"
                    raise FinetuneError(f"{where} ({first_line(error)})") from None
                time.sleep(wait)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        size = self._about.size
        if size is not None and self._at >= size:
            return b""
        if self._open is None:
            self._open = self._files.open(self._path, "rb")
            if self._at:
                self._open.seek(self._at)
        data = self._open.read(count)
        if not data and size is not None:
            raise OSError(f"it ends there, and has {size:,} bytes by the listing")
        return data

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        super().close()


def remote_files(address: str) -> dict[str, RemoteFile]:
    """The files at an address, by their names in it; nothing is copied.

    Raises:
        FinetuneError: there is no such file, or they cannot be listed.
    """
    files, root = file_system(address)
    with asking(address, "cannot be listed"):
        several = "*" in root
        listed: dict[str, Any] = (files.glob if several else files.find)(root, detail=True)
        # A list of links has names alone.
        found = {
            path: about if _version(about) and path != root else files.info(path)
            for path, about in sorted(listed.items())
            if about.get("type") != "directory"
        }
    if not found:
        raise FinetuneError(f"data.source: '{address}' has no files")
    one = [*found] == [root]
    fixed = root.partition("*")[0] if several else root if one else root.rstrip("/") + "/"
    start = len(fixed.rpartition("/")[0]) + 1
    return {
        path[start:]: RemoteFile(files.unstrip_protocol(path), _version(about), about.get("size"))
        for path, about in found.items()
    }
