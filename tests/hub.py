"""A hub on this machine: what huggingface_hub asks for, answered from folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `root/models/OWNER/NAME` and `root/datasets/OWNER/NAME`.

    Yields the address, and what was asked so far.
    """
    asked: list[str] = []

    class Handler(_Handler):
        folder, requests = root, asked

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    requests: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.requests.append(format % args)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        kind, owner, name = self._parts()[1:4]
        repo = self.folder / kind / owner / name
        found = [_entry(repo, repo / path) for path in wanted if (repo / path).exists()]
        self._json(found)

    def do_GET(self) -> None:
        parts = self._parts()
        if parts[0] == "api":
            if len(parts) < 4:
                self._missing("RepoNotFound")  # who is asking, and the like
            else:
                self._ask(*parts[1:4], parts[4:])
            return
        kind = "datasets" if parts[0] == "datasets" else "models"
        owner, name, verb, _, *path = parts[kind == "datasets" :]
        file = self.folder.joinpath(kind, owner, name, *path)
        if verb == "resolve" and file.is_file():
            self._file(file)
        else:
            known = self.folder.joinpath(kind, owner, name).is_dir()
            self._missing("EntryNotFound" if known else "RepoNotFound")

    def _parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _ask(self, kind: str, owner: str, name: str, rest: list[str]) -> None:
        """What the hub says of a repository, or of a folder in it."""
        repo = self.folder / kind / owner / name
        if not repo.is_dir():
            self._missing("RepoNotFound")
            return
        files = sorted(path for path in repo.rglob("*") if path.is_file())
        if rest[:1] == ["tree"]:
            inside = repo.joinpath(*rest[2:])
            deep = parse_qs(urlsplit(self.path).query).get("recursive") == ["true"]
            found = [_entry(repo, path) for path in sorted(inside.glob("**/*" if deep else "*"))]
            self._json(found) if inside.is_dir() else self._missing("EntryNotFound")
            return
        siblings = [{"rfilename": str(path.relative_to(repo))} for path in files]
        told = {"_id": "0", "id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}
        self._json(told | {"private": False, "tags": [], "downloads": 0, "likes": 0})

    def _file(self, file: Path) -> None:
        content = file.read_bytes()
        start, end = 0, len(content)
        if (given := self.headers.get("Range")) is not None:
            first, last = given.removeprefix("bytes=").split("-")
            start, end = int(first), min(end, int(last) + 1 if last else end)
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": tag, "Accept-Ranges": "bytes"}
        if start or end < len(content):
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._answer(206 if "Content-Range" in headers else 200, content[start:end], headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(repo: Path, path: Path) -> dict[str, Any]:
    kind, oid, size = "directory", COMMIT, 0
    if path.is_file():
        kind, oid = "file", hashlib.sha1(path.read_bytes()).hexdigest()
        size = path.stat().st_size
    return {"type": kind, "path": str(path.relative_to(repo)), "oid": oid, "size": size}
