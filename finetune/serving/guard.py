"""Reject HTTP requests by host name, key, content type, size and time, before the application."""

import asyncio
import base64
import hashlib
import re
import secrets
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from finetune.serving.problem import problem
from finetune.serving.serve import LOCAL

JSON = "application/json"
LARGEST_BODY = 8 * 2**20
"""Maximum bytes of a request."""
BODY_SECONDS = 60.0
"""Seconds in which a body must arrive."""
HEADER_SECONDS = 20.0
"""Seconds in which the headers of a request must arrive."""


class Guard:
    """An ASGI middleware that checks the headers, and then reads the body completely."""

    def __init__(self, app: ASGIApp, key: str | None, local: bool) -> None:
        """See `build_app` for the arguments."""
        self.app, self.key, self.local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: Response | None = None
        if scope["type"] == "http":
            refusal = self._refusal(scope, Headers(scope=scope))
            if refusal is None and scope["method"] == "POST":
                body = await _read(receive)
                if body is None:
                    return
                if isinstance(body, Response):
                    refusal = body
                else:
                    receive = _replayed(body, receive)
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if self.local and without_port(host) not in LOCAL:
            return problem(400, f"host: got '{host}', expected one of {', '.join(LOCAL)}")
        given = headers.get("authorization", "").removeprefix("Bearer ")
        right = self.key is None or secrets.compare_digest(given.encode(), self.key.encode())
        if scope["path"].startswith("/v1") and not right:
            return problem(401, "send the server's key as 'Authorization: Bearer KEY'")
        kind = headers.get("content-type", "")
        if scope["method"] == "POST" and kind.partition(";")[0].strip().lower() != JSON:
            return problem(415, f"content-type: got '{kind}', expected {JSON}")
        return None


def without_port(host: str) -> str | None:
    """The name or address of a Host header, without the brackets of IPv6."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _read(receive: Receive) -> bytes | Response | None:
    """The body, a refusal of it, or None if the client has disconnected."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > LARGEST_BODY:
                    return problem(413, f"the request has more than {LARGEST_BODY:,} bytes")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        text = (
            f"{size:,} bytes of the body arrived within {BODY_SECONDS:g} seconds, and not its end"
        )
        return problem(408, text, {"Connection": "close"})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receive a body that has been read."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def policy(page: str) -> str:
    """A Content-Security-Policy for the page's own script and style, images that are dropped into
    it, and requests to its server."""
    parts = re.findall(r"<(style|script)>(.*?)</", page, re.DOTALL)
    allowed = "; ".join(
        f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for tag, text in parts
    )
    own = "img-src data:; connect-src 'self'"
    rest = f"{own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {allowed}; {rest}"


class TimedConnection(H11Protocol):
    """A connection of uvicorn, which (0.54) waits without limit for the rest of the headers.

    Clients that send them slowly could otherwise occupy all file descriptors of the server.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # cancels the timer
        self._limit()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()  # starts the timer of an idle connection

    def _limit(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_at(
                self._since + HEADER_SECONDS, self.timeout_keep_alive_handler
            )
