"""Chat with the results of runs: the board passes requests on to `finetune serve` of each."""

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fastapi.responses import HTMLResponse, Response
from starlette.responses import StreamingResponse

from finetune.board import run_page
from finetune.board.shelf import Shelf
from finetune.board.tasks import Task, Tasks
from finetune.errors import FinetuneError
from finetune.serving import __file__ as SERVING
from finetune.serving.guard import policy
from finetune.serving.problem import problem

READY = re.compile(r"^serving (.+) at (http://\S+)/v1, ", re.MULTILINE)
"""What `finetune serve` prints when it answers."""
SECONDS_TO_LOAD = 300.0
SECONDS = 600.0
"""Seconds until an answer begins."""


class Served(NamedTuple):
    """A running server."""

    task: Task
    models: list[str]
    url: str


def servers(tasks: Tasks) -> list[Served]:
    """The servers that answer, the newest first."""
    found = list[Served]()
    for task in tasks.all():
        if task.verb == "serve" and not task.ended and task.state == "running":
            said = READY.search("\n".join(task.last_words()))
            if said is not None:
                found.append(Served(task, said[1].split(", "), said[2]))
    return found


def page(shelf: Shelf, tasks: Tasks, run: str) -> Response | dict[str, Any]:
    """The chat page of a run, or the values of the page that waits for it.

    Raises:
        FinetuneError: there is no such run, or its server does not run.
    """
    shelf.watch(run)
    mine = [task for task in tasks.of(run) if task.verb == "serve"]
    ready = next((served for served in servers(tasks) if served.task.run == run), None)
    if ready is not None:
        text = (Path(SERVING).parent / "page.html").read_text(encoding="utf-8")
        text = text.replace('"/v1/', f'"/talk/{ready.task.id}/v1/')
        return HTMLResponse(text, headers={"Content-Security-Policy": policy(text)})
    if not mine or mine[0].state not in ("running", "queued"):
        said = "\n".join(mine[0].last_words()[-5:]) if mine else ""
        raise FinetuneError(
            f"{run}: is not served; press Chat on its page", *filter(None, said.split("\n"))
        )
    return {"title": f"Chat with {run}", "run": run, "task": mine[0]}


def models(tasks: Tasks) -> dict[str, Any]:
    """The answer to /v1/models: the models of all servers."""
    names = [name for served in servers(tasks) for name in served.models]
    listed = [
        {"id": name, "object": "model", "created": 0, "owned_by": "finetune"}
        for name in dict.fromkeys(names)
    ]
    return {"object": "list", "data": listed}


def by_model(shelf: Shelf, tasks: Tasks, body: bytes) -> Served | Response:
    """The server of the model that a request names, which is started for a run that has none."""
    try:
        name = json.loads(body)["model"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return problem(400, "model: missing, or the body is not JSON")
    until = time.monotonic() + SECONDS_TO_LOAD
    task = None
    while time.monotonic() < until:
        known = servers(tasks)
        if found := next((served for served in known if name in served.models), None):
            return found
        if task is None:
            watch = shelf.watches().get(name) if isinstance(name, str) else None
            if watch is None or not watch.run.steps():
                listed = ", ".join(name for served in known for name in served.models) or "none"
                return problem(404, f"model: got '{name}', served now: {listed}")
            mine = [each for each in tasks.of(name) if each.verb == "serve" and each.is_open]
            task = mine[0] if mine else run_page.begin(shelf, tasks, name, "serve")
        if task.ended:
            return problem(503, "\n".join(task.last_words()[-5:]) or "the model was not loaded")
        time.sleep(0.2)
    return problem(503, f"{name}: not loaded within {SECONDS_TO_LOAD:.0f} s")


def by_id(tasks: Tasks, id: str) -> Served:
    """The server of a task; raises FinetuneError if it has ended."""
    found = next((served for served in servers(tasks) if served.task.id == id), None)
    if found is None:
        raise FinetuneError("the model is not served any more; press Chat on its page again")
    return found


def forward(served: Served, method: str, path: str, body: bytes) -> Response:
    """The server's answer to a request, as it arrives."""
    place = urlsplit(served.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return problem(503, f"{served.url}: no answer ({error}); its output is on its run's page")

    def pieces() -> Iterator[bytes]:
        try:
            while piece := answer.read1(1 << 16):
                yield piece
        finally:
            connection.close()  # the server then stops answering

    return StreamingResponse(pieces(), answer.status, media_type=answer.getheader("content-type"))
