"""The runs of a folder, by name, each with what a page shows of it; everything is read again."""

import dataclasses
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.board.curves import Curves
from finetune.errors import FinetuneError
from finetune.runs.environment import public
from finetune.runs.metrics import History, history_of, parse
from finetune.runs.progress import Watch, find_runs
from finetune.runs.run import Run, read_object
from finetune.runs.summary import title

SECONDS_OF_A_LIST = 1.0
"""Seconds until the folder is searched again."""
MOST_CURVES = 16
"""Runs whose curves are kept in memory."""


@dataclasses.dataclass(frozen=True)
class About:
    """What the recipe of a run says, for a list."""

    title: str
    differs: list[str]
    """Fields that differ from those of the recipe after which the run is named."""
    problem: str = ""
    """Why the record cannot be read."""


class Shelf:
    """The runs in a folder; names are paths below it, so that no other folder can be named."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._watches: dict[str, Watch] = {}
        self._about: dict[str, tuple[Any, About]] = {}
        self._curves: OrderedDict[str, Curves] = OrderedDict()
        self._listed = -SECONDS_OF_A_LIST

    def watches(self) -> dict[str, Watch]:
        """Every run, read anew, the one with the newest record first."""
        with self._lock:
            if time.monotonic() - self._listed > SECONDS_OF_A_LIST:
                found = {str(run.root.relative_to(self.root)): run for run in find_runs(self.root)}
                kept = {name: w for name, w in self._watches.items() if name in found}
                self._watches = {name: kept.get(name) or Watch(run) for name, run in found.items()}
                self._listed = time.monotonic()
            for watch in self._watches.values():
                watch.read()
            found = sorted(self._watches.items(), key=lambda each: (-each[1].updated, each[0]))
            return dict(found)

    def watch(self, name: str) -> Watch:
        """One run, read anew.

        Raises:
            FinetuneError: there is no such run.
        """
        with self._lock:
            if name not in self._watches or not self._watches[name].run.root.is_dir():
                self._listed = -SECONDS_OF_A_LIST
                self.watches()
            if name not in self._watches:
                raise FinetuneError(f"{name}: no such run in {self.root}; it may have been deleted")
            return self._watches[name].read()

    def curves(self, name: str) -> tuple[Curves, bool]:
        """The curves of a run, and whether all of its file has been read."""
        run = self.watch(name).run
        with self._lock:
            curves = self._curves.pop(name, None) or Curves(run)
            self._curves[name] = curves
            if len(self._curves) > MOST_CURVES:
                self._curves.popitem(last=False)
            return curves, curves.read()

    def whole_curves(self, name: str) -> Curves:
        """The curves of a run, read to the end of its file."""
        while True:
            found, whole = self.curves(name)
            if whole:
                return found

    def about(self, name: str) -> About:
        """What a run's recipe says; read again when it changes."""
        run = self._watches[name].run
        stamp = _stamp(run.recipe)
        known = self._about.get(name)
        if known is None or known[0] != stamp:
            known = self._about[name] = stamp, _about(run)
        return known[1]


def _stamp(path: Path) -> Any:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _about(run: Run) -> About:
    try:
        recipe = read_object(run.recipe)
        if not recipe:
            return About("not started", [])
        return About(title(recipe), differences(run, recipe))
    except FinetuneError as error:
        return About(run.root.name, [], str(error))
    except (TypeError, AttributeError, ValueError, LookupError):
        return About(run.root.name, [], f"{run.recipe}: not a recipe that training wrote")


def differences(run: Run, recipe: dict[str, Any]) -> list[str]:
    """Fields of a run that differ from the recipe of its name, as `optim.lr=0.001`."""
    path = catalog.names().get(run.root.name)
    shipped = Path(catalog.__file__).parents[1]
    if path is None or (path.suffix == ".py" and not path.resolve().is_relative_to(shipped)):
        return []  # a user's Python file is not run to show a list
    try:
        usual = catalog.flatten(public(catalog.to_fields(catalog.load(path))))
    except FinetuneError:
        return []
    mine = catalog.flatten(public(recipe))
    return [f"{name}={value}" for name, value in mine.items() if value != usual.get(name)]


def history(watch: Watch) -> History:
    """The records of a run without its steps, of which only the last is there.

    Raises:
        FinetuneError: a record has an unknown structure.
    """
    end = [] if watch.end is None else [watch.end]
    last = [watch.last] if watch.last else []
    measured = [watch.measured] if watch.measured else []
    listed = [*watch.starts, *watch.warnings, *measured, *watch.evaluations, *watch.saved, *last]
    listed.sort(key=lambda record: (record.get("step") or 0, record.get("time") or 0.0))
    return history_of([parse(watch.run, record) for record in [*listed, *end]])
