"""A board in a process of its own, and clients of it."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from conftest import end_tree, start

from finetune.board.tasks import Tasks


class Board:
    """A running board, with a client that has its token and one that has not."""

    def __init__(self, root: Path, process: "subprocess.Popen[str]", address: str) -> None:
        self.root, self.process = root, process
        self.url, _, self.token = address.partition("/?token=")
        bearer = {"Authorization": f"Bearer {self.token}"}
        # Certificates, which HTTP does not need, take a while to load.
        plain = {"base_url": self.url, "timeout": 120, "verify": False}
        self.user, self.reader = httpx.Client(headers=bearer, **plain), httpx.Client(**plain)

    def page(self, path: str, **query: Any) -> str:
        answer = self.user.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.text

    def do(self, path: str, **form: Any) -> httpx.Response:
        answer = self.user.post(path, data=form)
        assert answer.status_code in (200, 303), answer.text
        return answer

    def wait(self, holds: Callable[[], Any], seconds: float = 240) -> Any:
        until = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < until, self.page("/")
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def boarding(
    root: Path, folder: Path, warm: bool = False, keeps: bool = False, **env: str
) -> Iterator[Board]:
    """A board of a folder of runs, which works in another folder.

    With `warm`, the imports of the commands that it starts are already done; with `keeps`, they go
    on when it ends.
    """
    for place in (root, folder):
        place.mkdir(parents=True, exist_ok=True)
    process = start(["board", str(root), "--port", "0"], folder, warm, **env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "token=" not in line:
            raise AssertionError(line + process.communicate()[1])
        yield Board(root, process, line.split(": ", 1)[1].strip())
        if process.poll() is None:
            process.terminate()
            said = process.communicate(timeout=20)[1]
            assert "Traceback" not in said, said
    finally:
        if process.poll() is None:
            end_tree(process.pid)
        process.wait()
        if root.is_dir() and not keeps:
            tasks = Tasks(root)
            for task in tasks.all():
                if task.is_open:  # it would outlast the test, as it outlasts the board
                    tasks.stop(task)
