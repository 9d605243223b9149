"""Connections of the server that send slowly, or for other names than its own, are refused."""

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from finetune.serving import guard
from finetune.serving.guard import Guard, TimedConnection

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that it receives."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    config = uvicorn.Config(
        Guard(echo, None, True), port=0, http=TimedConnection, lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def all_of(port: int, *parts: bytes) -> bytes:
    """What the server sends until it closes the connection, with pauses between the parts."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        found = b""
        with contextlib.suppress(ConnectionError):  # it refuses before it has read everything
            for part in parts:
                client.sendall(part)
                time.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            while more := client.recv(4096):
                found += more
        return found


def test_slow_headers_and_bodies_time_out(port):
    assert (all_of(port, b""), all_of(port, HEAD[:1], HEAD[1:2], HEAD[2:3])) == (b"", b"")
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    served = all_of(port, whole, HEAD[:9], HEAD[9:12])  # the second request of a connection
    assert (served.count(b"HTTP/1.1 200"), served.count(b"HTTP/1.1")) == (1, 1)
    cut = all_of(port, HEAD + b"Content-Length: 3\r\n\r\n{")
    assert cut.startswith(b"HTTP/1.1 408")
    assert b"1 bytes of the body arrived within 0.3 seconds, not its end" in cut
    assert all_of(port, whole * 3, HEAD[:9]).count(b"HTTP/1.1 200") == 3  # pipelined


MEBIBYTE = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
MALFORMED: dict[str, tuple[bytes, list[int]]] = {
    "no HTTP": (b"\x00\x01\r\n\r\n", [400]),
    "a long header": (HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n", [400]),
    "many headers": (HEAD + b"X: a\r\n" * 50_000 + b"\r\n", [400]),
    "a chunk without a size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", [400]),
    "a long chunked body": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + 9 * MEBIBYTE, [413]),
    "a negative length": (HEAD + b"Content-Length: -1\r\n\r\n{}", [400]),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", [400]),
    "a longer body": (HEAD + b"Content-Length: 2\r\n\r\n{}{}\r\n\r\n", [200, 400]),
    "a shorter body": (HEAD + b"Content-Length: 9\r\n\r\n{}", [408]),
    "a huge length": (HEAD + b"Content-Length: 99999999999\r\n\r\n" + b"x" * 9 * 2**20, [413]),
}


def test_malformed_requests_are_refused_and_the_server_goes_on(port):
    for name, (request, statuses) in MALFORMED.items():
        found = re.findall(rb"HTTP/1.1 (\d+)", all_of(port, request))
        assert list(map(int, found)) == statuses, name
        sound = all_of(port, HEAD + b"Connection: close\r\n" + b"Content-Length: 2\r\n\r\n{}")
        assert sound.startswith(b"HTTP/1.1 200"), name


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200),
        ("localhost.evil.example", 400), ("evil.example", 400), ("[::1", 400), ("[::2]:80", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_served(host, status):
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(echo, None, True))
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://localhost/", headers={"host": host})

    assert asyncio.run(ask()).status_code == status
