"""Who may ask the board, and how much: hosts, origins, the token, and the sizes of bodies."""

import hashlib
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from finetune.errors import FinetuneError
from finetune.runs.run import replacing
from finetune.serving.guard import LARGEST_BODY, LOCAL, limited, without_port
from finetune.serving.problem import problem

LARGEST_FILE = 4 * 2**30
"""Maximum bytes of an uploaded file."""
READS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without one, a form is sent from the origin `null`
    "Cache-Control": "no-store",
}
"""Headers of every answer that has none of its own: its own files, and no other host's."""
PAGE_OF_A_RUN = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Policy of a page that a run wrote: no script, and no request."""


def token_of(folder: Path, given: str | None) -> str:
    """The token of the boards of a folder: the given one, or one that is made once and kept.

    Raises:
        FinetuneError: the folder cannot be written.
    """
    if given:
        return given
    path = folder / "token"
    try:
        if path.is_file() and (known := path.read_text(encoding="ascii").strip()):
            return known
        folder.mkdir(parents=True, exist_ok=True)
        made = secrets.token_urlsafe(24)
        with replacing(path) as scratch:
            scratch.touch(mode=0o600)
            scratch.write_text(made, encoding="ascii")
    except (OSError, ValueError) as error:
        raise FinetuneError(
            f"{path}: cannot be used ({error}); make the folder writable, or set FINETUNE_API_KEY"
        ) from None
    return made


class Access:
    """An ASGI middleware: refuses what the board must not answer, before it reads a body.

    A page is read without the token on this machine. Whatever changes something, and everything
    from another host, needs it: as a cookie, which the address with `?token=` sets, or as
    `Authorization: Bearer TOKEN`.
    """

    def __init__(self, app: ASGIApp, token: str, local: bool) -> None:
        """`local`: whether only this machine can connect."""
        self.app, self.token, self.local = app, token, local
        self.cookie = f"board_{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        """Ports share cookies: the name is that of this board's token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["trusted"] = trusted = self._has_token(headers)
        answer = self._entered(scope) or self._refusal(scope, headers, trusted)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        most = LARGEST_FILE if scope["path"] in ("/v1/files", "/files") else LARGEST_BODY
        await self.app(scope, limited(receive, most), _with_headers(send))

    def _has_token(self, headers: Headers) -> bool:
        given = [headers.get("authorization", "").removeprefix("Bearer ").strip()]
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
            given += [] if morsel is None else [morsel.value]
        except CookieError:
            pass
        return any(secrets.compare_digest(each.encode(), self.token.encode()) for each in given)

    def _entered(self, scope: Scope) -> Response | None:
        """The answer to an address with the token: a cookie, and the address without it."""
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if not given or scope["method"] not in READS:
            return None
        if not secrets.compare_digest(given[-1].encode(), self.token.encode()):
            return PlainTextResponse("token: not that of this board", 403)
        rest = urlencode([pair for pair in pairs if pair[0] != "token"])
        place = "/" + quote(scope["path"].lstrip("/"))  # `//host` would be another host's
        answer = RedirectResponse(f"{place}?{rest}" if rest else place, 303)
        answer.set_cookie(
            self.cookie, self.token, max_age=400 * 86400, httponly=True, samesite="strict"
        )
        return answer

    def _refusal(self, scope: Scope, headers: Headers, trusted: bool) -> Response | None:
        host = headers.get("host", "")
        if self.local and without_port(host) not in LOCAL:
            return problem(400, f"host: got '{host}', expected one of {', '.join(LOCAL)}")
        if scope["method"] in READS:
            if self.local and not scope["path"].startswith("/v1"):
                return None
        elif not _same_origin(headers, host):
            return problem(403, "origin: a page of another site asked for this; it is refused")
        if trusted:
            return None
        return problem(
            401,
            "token: missing; open the address that `finetune board` printed, or send "
            "'Authorization: Bearer TOKEN'",
        )


def _same_origin(headers: Headers, host: str) -> bool:
    """Whether a browser's request comes from the board's own page; other clients send neither."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == host
    except ValueError:
        return False


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
