"""Make the pages from templates: those of `finetune.reports` and the board's own."""

import functools
import math
import time
from pathlib import Path
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from finetune.board.shelf import Shelf
from finetune.board.tasks import Task, Tasks, command
from finetune.reports import tables
from finetune.runs import units
from finetune.runs.progress import Watch

BADGES = {
    "finished": "good", "stopped early": "good", "running": "live", "starting": "live",
    "queued": "warn", "paused": "warn", "interrupted": "warn", "killed": "bad", "failed": "bad",
}  # fmt: skip
"""Look of a state."""


@functools.cache
def environment() -> jinja2.Environment:
    own = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    reports = tables.templates()
    assert reports.loader is not None
    found = reports.overlay(loader=jinja2.ChoiceLoader([own, reports.loader]))
    found.filters |= {
        "bytes": lambda value: units.size(value) if value else "",
        "duration": lambda value: "" if math.isnan(value) else units.duration(value),
        "loss": lambda value: "" if math.isnan(value) else units.loss(value),
        "since": lambda when: units.duration(time.time() - when),
        "count": units.count,
        "lr": units.learning_rate,
        "command": command,
    }
    found.globals["badges"] = BADGES
    return found


def trusted(request: Request) -> bool:
    """Whether a request has the token."""
    return bool(request.scope.get("trusted"))


def page(name: str, request: Request, **values: Any) -> str:
    """A page, or a part of one."""
    known = {"trusted": trusted(request), "path": request.url.path, "title": "Runs"}
    return rendered(name, **known | values)


def rendered(name: str, **values: Any) -> str:
    return environment().get_template(f"{name}.html.jinja").render(values)


def of_htmx(request: Request) -> bool:
    """Whether a part of a page is asked for, not a page."""
    return request.headers.get("hx-request") == "true"


def part(name: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    """A part of a page for the scripts of one, or a page that has nothing else."""
    whole = name if of_htmx(request) else "alone"
    return HTMLResponse(page(whole, request, part=f"{name}.html.jinja", **values), status)


def row(name: str, watch: Watch, shelf: Shelf, tasks: list[Task]) -> dict[str, Any]:
    """A run in the list."""
    state = state_of(watch, tasks)
    return {"name": name, "about": shelf.about(name), "state": state, "now": watch}


def state_of(watch: Watch, tasks: list[Task]) -> str:
    """The state of a run, or of the launch that it waits for."""
    launch = next((task for task in tasks if task.verb == "launch"), None)
    if launch is not None and not watch.locked:
        state = launch.state
        if state == "running":
            return "starting"
        newer = launch.created > watch.updated or not watch.start
        if newer and state in ("queued", "paused", "failed", "cancelled"):
            return state
        if state == "failed" and watch.state == "killed":
            return state
    return watch.state


def listed(shelf: Shelf, tasks: Tasks) -> dict[str, Any]:
    """The runs and the tasks that wait."""
    everything = tasks.all()
    of: dict[str, list[Task]] = {}
    for task in everything:
        of.setdefault(task.run, []).append(task)
    watches = shelf.watches()
    rows = [row(name, watch, shelf, of.get(name, [])) for name, watch in watches.items()]
    waiting = [task for task in everything if not task.ended and task.state in ("queued", "paused")]
    return {"runs": rows, "waiting": waiting[::-1], "root": str(shelf.root)}


def changes(shelf: Shelf, tasks: Tasks) -> dict[str, str]:
    """A text that changes when the list does."""
    found = listed(shelf, tasks)
    rows = [
        (each["name"], each["state"], now.step, now.loss, now.best)
        for each in found["runs"]
        if (now := each["now"])
    ]
    return {"list": str(hash(str((rows, [task.id for task in found["waiting"]]))))}
