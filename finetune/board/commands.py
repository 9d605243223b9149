"""The commands that the buttons of a run are: what is shown to copy is what is started."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from finetune.board.tasks import command
from finetune.runs.progress import Watch
from finetune.runs.run import Run, read_object


class Button(NamedTuple):
    """Something that can be done with a run now."""

    verb: str
    label: str
    about: str
    words: list[str]
    """The arguments of `finetune`."""

    @property
    def command(self) -> str:
        return command(self.words)


def shown(path: Path) -> str:
    """A path as it is written in a command: relative if it lies below the working folder."""
    try:
        return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    except OSError:
        return str(path)


def buttons(watch: Watch) -> list[Button]:
    """The buttons of a run, by its state and what it has written."""
    run, state = watch.run, watch.state
    root = shown(run.root)
    if state in ("running", "starting"):
        about = "It saves, ends, and can be resumed."
        return [Button("stop", "Save and stop", about, ["stop", root])]
    found = list[Button]()
    if state in ("interrupted", "killed") and run.recipe.is_file():
        about = "It continues from its newest checkpoint." if run.steps() else "It starts again."
        found.append(Button("launch", "Resume", about, resume_words(run)))
    if run.steps():
        adapter = bool(read_object(run.recipe).get("adapter"))
        to = f"{root}-{'merged' if adapter else 'export'}"
        export = ["export", root, "--to", to, *(["--merge"] if adapter else [])]
        serve = ["serve", root, "--port", "0", "--name", run.root.name]
        about = "Its answers on held-out rows, beside those of its base."
        found.append(Button("eval", "Evaluate", about, ["eval", root]))
        found.append(Button("export", "Export", f"A model for other libraries, in {to}.", export))
        about = "It is loaded, and answers beside its base."
        found.append(Button("serve", "Chat", about, serve))
    if watch.last:
        about = "One page with everything, to keep or to send."
        found.append(Button("report", "Report", about, ["report", root]))
    return found


def resume_words(run: Run) -> list[str]:
    """The launch of a run on as many processes of the same backend as before."""
    plan: dict[str, Any] = read_object(run.plan)
    words = ["launch", shown(run.recipe), "--output", shown(run.root), "--resume", "auto"]
    if plan.get("backend", "launched") != "launched":  # of Accelerate's flags, without a name
        words += ["--backend", str(plan["backend"])]
    if plan.get("precision"):
        words += ["--precision", str(plan["precision"])]
    if plan.get("processes", 1) > 1:
        words += ["--processes", str(plan["processes"])]
    return words
