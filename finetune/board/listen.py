"""Run the board's server until it is interrupted."""

from pathlib import Path

from finetune.errors import FinetuneError
from finetune.serving import serve as server

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
    server.check_host(host, token)
    with server.needing_extra("finetune board"):
        from finetune.board.access import token_of
        from finetune.board.app import build_app
    if root.exists() and not root.is_dir():
        raise FinetuneError(f"{root}: not a folder; name the folder of the runs")
    token = token_of(root / ".board", token)
    with server.listening(host, port) as taken:
        app = build_app(root, token, local=host in server.LOCAL)
        page = f"run?run={run}&" if run else "?"
        print(f"board of {root}: {server.address_of(host, taken)}/{page}token={token}", flush=True)
        print("runs go on without it; Ctrl-C ends it", flush=True)
        settings = {"timeout_graceful_shutdown": 2, "limit_concurrency": MOST_CONNECTIONS}
        server.answer(app, taken, app.state.live.end, **settings)
