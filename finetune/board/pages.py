"""Make the pages from templates: those of `finetune.reports` and the board's own."""

import functools
import math
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.requests import Request

from finetune.board.commands import command
from finetune.board.shelf import Shelf
from finetune.board.tasks import Task, Tasks
from finetune.reports import tables
from finetune.runs import units
from finetune.runs.progress import Watch

MOST_DIFFERENCES = 5
BADGES = {
    "finished": "good", "stopped early": "good", "running": "live", "starting": "live",
    "queued": "warn", "paused": "warn", "interrupted": "warn", "killed": "bad", "failed": "bad",
}  # fmt: skip
"""Look of a state."""


@functools.cache
def environment() -> jinja2.Environment:
    found = tables.templates()
    own = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    assert found.loader is not None
    found.loader = jinja2.ChoiceLoader([own, found.loader])
    found.filters |= {
        "bytes": lambda value: units.size(value) if value else "",
        "duration": lambda value: "" if value is None else units.duration(value),
        "loss": lambda value: "" if value is None or math.isnan(value) else units.loss(value),
        "count": units.count,
        "lr": units.learning_rate,
        "query": lambda value: urlencode(value, doseq=True),
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


def card(text: str) -> str:
    """A part of a page that says what is wrong."""
    return rendered("problem", text=text)


def row(name: str, watch: Watch, shelf: Shelf, tasks: list[Task]) -> dict[str, Any]:
    """A run in the list."""
    about, best = shelf.about(name), watch.best
    state = state_of(watch, tasks)
    return {
        "name": name,
        "about": about,
        "differs": about.differs[:MOST_DIFFERENCES],
        "more": max(0, len(about.differs) - MOST_DIFFERENCES),
        "state": state,
        "step": watch.step,
        "steps": watch.steps,
        "loss": watch.loss,
        "best": best,
        "left": None if math.isnan(watch.seconds_left) else watch.seconds_left,
        "peak": watch.peak_memory,
        "measured": watch.measured.get("peak"),
        "planned": watch.measured.get("predicted") if watch.measured else None,
        "since": time.time() - watch.updated if watch.updated else None,
    }


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
        (each["name"], each["state"], each["step"], each["loss"], each["best"])
        for each in found["runs"]
    ]
    return {"list": str(hash(str((rows, [task.id for task in found["waiting"]]))))}
