"""Run the HTTP server until it is interrupted."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.version import install

LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    rows: int = 8,
    queue: int = 16,
    key: str | None = None,
    web_images: bool = False,
) -> None:
    """Serve a run, a folder with a model or an adapter, or a hub name.

    Args:
        port: Port to listen on; 0 for any free port.
        name: Name of the model in requests; by default that of its folder.
        adapters: Folders of more adapters on the same base, by name.
        rows: Maximum number of requests that are answered at once; each needs a KV cache.
        queue: Maximum number of waiting requests; further ones get status 429.
        web_images: Read images at the web addresses that requests name.
        key: API key that clients must send; required if `host` is not local.

    Raises:
        FinetuneError: the port is in use, a key is missing, the extra `serve` is not installed, or
            the model cannot be loaded.
    """
    check_host(host, key)
    with needing_extra("finetune serve"):
        from finetune.serving.app import build_app
    from finetune.serving.models import open_models
    from finetune.serving.requests import download

    with listening(host, port) as taken:
        models, url = open_models(path, name, adapters), address_of(host, taken)
        fetch = download if web_images else None
        app = build_app(models, rows=rows, queue=queue, key=key, local=host in LOCAL, fetch=fetch)
        print(f"serving {', '.join(models)} at {url}/v1, chat page at {url}/", flush=True)
        print(f"up to {rows} answers at once; Ctrl-C ends it", flush=True)
        answer(app, taken, app.state.answers.end, timeout_graceful_shutdown=5)


@contextlib.contextmanager
def needing_extra(command: str) -> Iterator[None]:
    """Import what only the extra `serve` brings."""
    try:
        yield
    except ImportError as error:
        raise FinetuneError(f"{command} needs {error.name}: {install('serve')}") from None


def answer(app: Any, taken: socket.socket, end: Callable[[], None], **settings: Any) -> None:
    """Answer requests until interrupted; `end` is called first, as streams would be cut."""
    import uvicorn

    from finetune.serving.guard import TimedConnection

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            end()
            await super().shutdown(sockets)

    config = uvicorn.Config(app, http=TimedConnection, log_level="warning", **settings)
    Server(config).run(sockets=[taken])


def address_of(host: str, taken: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{taken.getsockname()[1]}"


def check_host(host: str, key: str | None) -> None:
    if host not in LOCAL and not key:
        raise FinetuneError(
            f"--host {host}: others could use the model; set a key in FINETUNE_API_KEY, or leave "
            "--host at 127.0.0.1"
        )


def listening(host: str, port: int) -> socket.socket:
    """Listen before the model is loaded; requests wait until it is.

    Raises:
        FinetuneError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen()  # a second server could bind the port until then
    except OSError as error:
        taken.close()
        raise FinetuneError(
            f"--port {port}: {host}:{port} cannot be used: {error.strerror}; name another port, or "
            "0 for a free one"
        ) from None
    return taken
