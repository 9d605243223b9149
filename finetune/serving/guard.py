"""Reject HTTP requests by host name, key, content type, size and time, before the application."""

import asyncio
import base64
import hashlib
import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
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
    """An ASGI middleware that checks the headers, and limits size and time of the body."""

    def __init__(self, app: ASGIApp, key: str | None, local: bool) -> None:
        """See `build_app` for the arguments."""
        self.app, self.key, self.local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
            await self.app(scope, limited(receive, LARGEST_BODY, BODY_SECONDS), send)
        except HTTPException as error:
            refusal = problem(error.status_code, error.detail, error.headers)
            await refusal(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.local and without_port(host) not in LOCAL:
            raise HTTPException(400, f"host: got '{host}', expected one of {', '.join(LOCAL)}")
        given = headers.get("authorization", "").removeprefix("Bearer ")
        right = self.key is None or secrets.compare_digest(given.encode(), self.key.encode())
        if scope["path"].startswith("/v1") and not right:
            raise HTTPException(401, "send the server's key as 'Authorization: Bearer KEY'")
        kind = headers.get("content-type", "")
        if scope["method"] == "POST" and kind.partition(";")[0].strip().lower() != JSON:
            raise HTTPException(415, f"content-type: got '{kind}', expected {JSON}")


def without_port(host: str) -> str | None:
    """The name or address of a Host header, without the brackets of IPv6."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def limited(receive: Receive, most: int, seconds: float | None = None) -> Receive:
    """Receive a body of at most `most` bytes, within some seconds if given.

    Otherwise status 413 or 408 is raised where it is read.
    """
    size, is_whole, until = 0, False, None if seconds is None else time.monotonic() + seconds

    async def received() -> Message:
        nonlocal size, is_whole
        left = None if until is None or is_whole else until - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), left)
        except TimeoutError:
            text = f"{size:,} bytes of the body arrived within {seconds:g} seconds, not its end"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body")
        if size > most:
            raise HTTPException(413, f"the request has more than {most:,} bytes")
        return message

    return received


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
