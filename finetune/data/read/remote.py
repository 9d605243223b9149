"""Copy the files at an address to the cache, each again only if it has changed there."""

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from finetune.cache import cache
from finetune.errors import FinetuneError
from finetune.process.progress import progress
from finetune.runs.addresses import asking, file_system
from finetune.runs.run import write_json

VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "mtime",
)  # fmt: skip
"""What file systems of fsspec call the version of a file, the best one first."""
KNOWN = ".versions.json"
"""The versions of the files in a folder of the cache, by name."""


def fetched(address: str) -> Path:
    """The local copy of a file, a folder or the files of a pattern.

    Args:
        address: Of a file system of fsspec; with `*`, the files that match.

    Raises:
        FinetuneError: there is no such file, or it cannot be read.
    """
    files, root = file_system(address)
    with asking(address, "cannot be listed"):
        several = "*" in root
        found: dict[str, Any] = files.glob(root, detail=True) if several else {}
        if not several:
            found = files.find(root, detail=True)
        if [*found] == [root]:
            found = {root: files.info(root)}
    found = {path: about for path, about in found.items() if about.get("type") != "directory"}
    if not found:
        raise FinetuneError(f"data.source: '{address}' has no files")
    is_file = [*found] == [root]
    fixed = root.partition("*")[0] if several else root if is_file else root.rstrip("/") + "/"
    start = len(fixed.rpartition("/")[0]) + 1
    folder = cache("sources") / hashlib.sha256(address.encode()).hexdigest()[:16]
    known: dict[str, Any] = _versions(folder)
    with progress(f"copying {address}", len(found), "files") as copied:
        for path, about in found.items():
            name = path[start:]
            version = next((str(about[key]) for key in VERSIONS if about.get(key)), None)
            there = (folder / name).is_file() and known.get(name, [None])[0]
            if version is None or there != version:
                _copy(files, path, folder / name, address)
                known[name] = [version, (folder / name).stat().st_size]
                write_json(folder / KNOWN, known)
            copied(1)
    for name in known.keys() - {path[start:] for path in found}:
        (folder / name).unlink(missing_ok=True)
        del known[name]
        write_json(folder / KNOWN, known)
    return folder / root[start:] if is_file else folder


def _versions(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / KNOWN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _copy(files: Any, path: str, target: Path, address: str) -> None:
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
