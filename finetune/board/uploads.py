"""Receive a form with files (RFC 7578): to the disk as it arrives, and never into memory."""

import contextlib
import mmap
import os
import re
import tempfile
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import IO, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request

from finetune.errors import FinetuneError

ENDINGS = {".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst"}
"""Endings of files of data."""


class Parts(NamedTuple):
    """The parts of a form."""

    fields: dict[str, str]
    files: dict[str, Path]
    names: dict[str, str]
    """Names of the files as they were sent."""


async def received(request: Request, folder: Path, name: str | None = None) -> Parts:
    """The parts of a form; its files are stored in a folder under names that are free there.

    Args:
        name: name of the stored file, before its ending; by default that which was sent.

    Raises:
        HTTPException: the body is no such form (400, 415), or too large (413).
        FinetuneError: a file is not a data file.
    """
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise HTTPException(415, "content-type: expected multipart/form-data with a boundary")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as body:
        async for piece in request.stream():
            body.write(piece)
        body.flush()
        return await run_in_threadpool(_parts, body, boundary.encode("latin-1"), folder, name)


def _parts(body: IO[bytes], boundary: bytes, folder: Path, name: str | None) -> Parts:
    found = Parts({}, {}, {})
    if not os.fstat(body.fileno()).st_size:
        raise HTTPException(400, "the form is empty")
    mark = b"--" + boundary
    with mmap.mmap(body.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = text.find(mark)
        while at >= 0 and text[at + len(mark) : at + len(mark) + 2] == b"\r\n":
            start = text.find(b"\r\n\r\n", at)
            end = text.find(b"\r\n" + mark, start + 2)
            if start < 0 or end < 0:
                break
            head = BytesHeaderParser().parsebytes(text[at + len(mark) + 2 : start + 2])
            part = str(head.get_param("name", "", "content-disposition"))
            sent = head.get_filename()
            if sent:
                found.names[part] = sent
                found.files[part] = _store(text, start + 4, end, folder, sent, name)
            elif sent is None:
                found.fields[part] = text[start + 4 : end].decode("utf-8", "replace")
            at = end + 2
        if at < 0 or text[at + len(mark) : at + len(mark) + 2] != b"--":
            raise HTTPException(400, "the form is cut off or damaged")
    return found


def _store(
    text: mmap.mmap, start: int, end: int, folder: Path, sent: str, name: str | None
) -> Path:
    """Write a part to a file whose name is plain and free."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", re.split(r"[\\/]", sent)[-1]).strip("._")[-80:]
    ending = Path(plain).suffix.lower()
    if ending not in ENDINGS:
        known = ", ".join(sorted(ENDINGS))
        raise FinetuneError(f"{sent}: not a file of data; expected one that ends in {known}")
    if start == end:
        raise FinetuneError(f"{sent}: is empty")
    stem = name or Path(plain).stem
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as scratch:
        with memoryview(text)[start:end] as part:
            scratch.write(part)
        scratch.flush()
        number = 1
        while True:
            path = folder / f"{stem}{f'-{number}' if number > 1 else ''}{ending}"
            with contextlib.suppress(FileExistsError):
                os.link(scratch.name, path)  # fails if the name is taken
                return path
            number += 1
