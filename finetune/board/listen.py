"""Run the board's server until it is interrupted."""

from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.serving.serve import LOCAL, check_host, listening
from finetune.version import install

MOST_CONNECTIONS = 256


def serve(root: Path, host: str, port: int, token: str | None, run: str = "") -> None:
    """Serve the board of a folder of runs.

    Args:
        port: Port to listen on; 0 for any free port.
        token: Token of writers, and of readers on other hosts; by default one that is kept in the
            folder. Required if `host` is not local.
        run: Name of a run whose page the printed address opens.

    Raises:
        FinetuneError: the folder or the port cannot be used, a token is missing, or the extra
            `serve` is not installed.
    """
    check_host(host, token)
    try:
        import uvicorn

        from finetune.board.access import token_of
        from finetune.board.app import build_app
        from finetune.serving.guard import TimedConnection
    except ImportError as error:
        raise FinetuneError(f"finetune board needs {error.name}: {install('serve')}") from None
    if root.exists() and not root.is_dir():
        raise FinetuneError(f"{root}: not a folder; name the folder of the runs")
    token = token_of(root / ".board", token)
    with listening(host, port) as taken:
        app = build_app(root, token, local=host in LOCAL)
        shown = f"[{host}]" if ":" in host else host
        page = f"run?run={run}&" if run else "?"
        url = f"http://{shown}:{taken.getsockname()[1]}/{page}token={token}"
        print(f"board of {root}: {url}", flush=True)
        print("runs go on without it; Ctrl-C ends it", flush=True)
        config = uvicorn.Config(
            app, http=TimedConnection, log_level="warning", timeout_graceful_shutdown=2,
            limit_concurrency=MOST_CONNECTIONS,
        )  # fmt: skip

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: Any = None) -> None:
                app.state.live.ended = True  # or streams would be cut after the timeout
                await super().shutdown(sockets)

        Server(config).run(sockets=[taken])
