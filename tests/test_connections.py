"""Connections of the server that send slowly, or for other names than its own, are refused."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from finetune.serving import connection, guard
from finetune.serving.connection import TimedConnection
from finetune.serving.guard import Guard

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that it receives."""
    body = (await receive()).get("body", b"")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
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
        for part in parts:
            client.sendall(part)
            time.sleep(0.05)
        found = b""
        while more := client.recv(4096):
            found += more
        return found


def test_slow_headers_and_bodies_time_out(port: int) -> None:
    assert all_of(port, b"") == b""
    assert all_of(port, HEAD[:1], HEAD[1:2], HEAD[2:3]) == b""
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    served = all_of(port, whole, HEAD[:9], HEAD[9:12])  # the second request of a connection
    assert (served.count(b"HTTP/1.1 200"), served.count(b"HTTP/1.1")) == (1, 1)
    cut = all_of(port, HEAD + b"Content-Length: 3\r\n\r\n{")
    assert cut.startswith(b"HTTP/1.1 408")
    assert b"1 bytes of the body arrived within 0.3 seconds" in cut
    assert all_of(port, whole * 3, HEAD[:9]).count(b"HTTP/1.1 200") == 3  # pipelined


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200),
        ("localhost.evil.example", 400), ("evil.example", 400), ("[::1", 400), ("[::2]:80", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_served(host: str, status: int) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(echo, None, True))
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://localhost/", headers={"host": host})

    assert asyncio.run(ask()).status_code == status
