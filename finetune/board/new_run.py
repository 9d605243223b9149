"""The pages that make a recipe and start it: from data, a shipped recipe, a file, or a run."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from finetune import backend as backends
from finetune import catalog
from finetune.board import form, planning
from finetune.board.commands import shown
from finetune.board.devices import devices
from finetune.board.shelf import Shelf
from finetune.board.tasks import Task, Tasks, Words, command, first
from finetune.errors import FinetuneError, one_of
from finetune.importers.recipe_file import path_of
from finetune.launchers import QUEUES
from finetune.launchers.chain import stages
from finetune.launchers.cluster import OVERRIDE
from finetune.planner.estimate import hardware
from finetune.process import interpreter
from finetune.recipe import Recipe
from finetune.runs.run import Run, read_object

SECONDS_OF_A_COMMAND = 300.0
PREFIX = "f."
"""Before the names of a form's inputs that are fields of the recipe."""


class Origin(NamedTuple):
    """What a form began with."""

    name: str
    """As in an address: a recipe's name, `run:NAME` or `file:NAME`."""
    word: str
    """As in a command."""
    recipe: Recipe
    stem: str
    """The first name of a run that is made from it."""


def origin(shelf: Shelf, tasks: Tasks, name: str) -> Origin:
    """A recipe by its name in an address; no other file can be named.

    Raises:
        FinetuneError: there is no such recipe, or it cannot be read.
    """
    kind, _, rest = name.partition(":")
    if kind == "run" and rest:
        path = shelf.watch(rest).run.recipe
        return Origin(name, shown(path), catalog.load(path), Path(rest).name)
    if kind == "file" and rest:
        path = recipes(tasks).get(rest)
        if path is None:
            raise FinetuneError(f"{rest}: no such recipe; make it again from its data")
        return Origin(name, shown(path), catalog.load(path), rest)
    if name not in catalog.names():
        raise FinetuneError(f"{name}: no such recipe")
    return Origin(name, name, catalog.resolve(name), name)


def recipes(tasks: Tasks) -> dict[str, Path]:
    """The recipes that were made from data here, by name."""
    return {path.stem: path for path in sorted((tasks.home / "recipes").glob("*.yaml"))}


def files(tasks: Tasks) -> dict[str, Path]:
    """The uploaded files by name."""
    folder = tasks.home / "files"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path for path in found if path.is_file() and path.name[0] != "."}


def page(shelf: Shelf, tasks: Tasks, asked: Words) -> dict[str, Any]:
    """The values of the page of an address: `from`, and `set` for each word that differs."""
    name = first(asked, "from")
    known = {
        "title": "New run", "recipes": {n: catalog.describe(p) for n, p in catalog.names().items()},
        "made": recipes(tasks), "runs": list(shelf.watches()), "files": files(tasks),
        "origin": None, "models": _models(shelf),
    }  # fmt: skip
    if not name:
        return known
    began = origin(shelf, tasks, name)
    return known | {
        "origin": began, "groups": form.groups(began.recipe), "first": form.FIRST,
        "gpus": list(hardware.GPUS), "launchers": list(QUEUES), "backends": backends.names(),
        "here": devices(),
        "output": first(asked, "output") or free_name(shelf, began),
        "given": _given(began, asked.get("set", [])), "prefix": PREFIX, "asked": asked,
        "errors": {},
    }  # fmt: skip


def _given(began: Origin, words: list[str]) -> dict[str, str]:
    """The values of a form from the words of its address."""
    found = dict(word.split("=", 1) for word in words if "=" in word)
    for group in form.groups(began.recipe):
        for field in group.fields:
            if field.kind == "section" and found.get(field.path) == "{}":
                found[field.path] = field.choices[0]
    return found


def address(got: "Filled", sent: Words) -> str:
    """The address of a form as it is filled in."""
    kept = [(name, sent[name][0]) for name in (*planning.MACHINE, "output") if first(sent, name)]
    pairs = [("from", got.origin.name), *kept, *(("set", word) for word in got.words)]
    return f"/new?{urlencode(pairs)}"


def _models(shelf: Shelf) -> list[str]:
    """Names of models that runs here trained, to choose from."""
    found = list[str]()
    for watch in shelf.watches().values():
        try:
            name = (read_object(watch.run.recipe).get("model") or {}).get("name")
        except (FinetuneError, AttributeError):
            continue
        if isinstance(name, str):
            found.append(name)
    return list(dict.fromkeys(found))[:20]


def free_name(shelf: Shelf, began: Origin) -> str:
    """A name of a run that does not exist."""
    taken = shelf.watches().keys()
    names = [began.stem, *(f"{began.stem}-{number}" for number in range(2, 1000))]
    return next(n for n in names if n not in taken and not (shelf.root / n).exists())


class Filled(NamedTuple):
    """A form as it was sent."""

    origin: Origin
    words: list[str]
    recipe: Recipe | None
    machine: planning.Machine | None
    errors: dict[str, str]
    """Problems by the path of a field."""
    others: list[str]
    """Problems that are about no field."""
    output: str


def filled(shelf: Shelf, tasks: Tasks, sent: Words) -> Filled:
    """Read a form; what is wrong in it is part of the answer."""
    began = origin(shelf, tasks, first(sent, "from"))
    given = {
        name.removeprefix(PREFIX): values[-1]
        for name, values in sent.items()
        if name.startswith(PREFIX)
    }
    words = form.words(began.recipe, given)
    recipe, machine, errors, others = None, None, dict[str, str](), list[str]()
    try:
        recipe = catalog.override(began.recipe, words) if words else began.recipe
    except FinetuneError as error:
        errors, others = form.misplaced(error, began.recipe)
    try:
        machine = planning.machine_of(sent)
    except FinetuneError as error:
        others += error.problems
    output = first(sent, "output")
    return Filled(began, words, recipe, machine, errors, others, output)


def planned(shelf: Shelf, tasks: Tasks, sent: Words) -> dict[str, Any]:
    """The plan of a form: its values, or what is wrong."""
    got = filled(shelf, tasks, sent)
    errors, others, found = got.errors, got.others, dict[str, Any]()
    if got.recipe is not None and got.machine is not None:
        try:
            found = dict.fromkeys(planning.PARTS) | planning.shown(got.recipe, got.machine)
        except FinetuneError as error:
            errors, others = form.misplaced(error, got.recipe)
    commands = list[str]()
    if got.machine is not None:
        output = shown(shelf.root / (got.output or free_name(shelf, got.origin)))
        changed = [*got.words, *found.get("words", ())]
        words = planning.launch_words(got.origin.word, changed, got.machine, output)
        commands = [command(words)]
        if got.machine.gpu:
            commands.append(planning.copied(got.origin.word, got.words, got.machine))
    return {
        "plan": found, "errors": errors, "others": others, "commands": commands,
        "address": address(got, sent),
        "groups": form.groups(got.origin.recipe),
    }  # fmt: skip


def start(shelf: Shelf, tasks: Tasks, sent: Words) -> str:
    """Queue the launch of a form; returns the page of the run.

    Raises:
        FinetuneError: what is wrong with the form, with the plan, or with this machine for it.
    """
    got = filled(shelf, tasks, sent)
    if got.recipe is None or got.machine is None:
        raise FinetuneError(*got.errors.values(), *got.others)
    name = got.output or free_name(shelf, got.origin)
    if got.machine.gpu:
        raise FinetuneError(
            "the plan is of another machine: choose this machine, or copy the command"
        )
    launch(shelf, tasks, name, got.origin.word, got.words, got.recipe, got.machine)
    return f"/run?{urlencode({'run': name})}"


def submission(shelf: Shelf, tasks: Tasks, sent: Words) -> dict[str, Any]:
    """What a scheduler would get for a form, by `finetune launch --dry-run`.

    Raises:
        FinetuneError: what is wrong with the form or the cluster.
    """
    got, launcher = filled(shelf, tasks, sent), first(sent, "launcher")
    wrong = [] if launcher in QUEUES else [f"launcher: expected {one_of(list(QUEUES))}"]
    if got.recipe is None or wrong:
        raise FinetuneError(*got.errors.values(), *got.others, *wrong)
    settings = first(sent, "cluster").split()
    own = [word for word in settings if word.startswith(OVERRIDE)]
    named = [word for each in settings if each not in own for word in ("--cluster", each)]
    if any("/" in word or "." in word for word in named):
        raise FinetuneError(
            "cluster: expected the name of a file in clusters/, or cluster.key=value"
        )
    words = ["launch", got.origin.word, *got.words, *own, "--launcher", launcher, *named]
    words += ["--backend", first(sent, "backend")] if first(sent, "backend") else []
    words += ["--output", shown(shelf.root / (got.output or free_name(shelf, got.origin)))]
    return {"text": run_command(*words, "--dry-run"), "command": command(words)}


def launch(
    shelf: Shelf,
    tasks: Tasks,
    name: str,
    word: str,
    words: list[str],
    recipe: Recipe,
    machine: planning.Machine,
    job: str = "",
) -> Task:
    """Queue the launch of a recipe as a new run.

    Raises:
        FinetuneError: the name is that of something else, the recipe cannot run here, or this
            machine never has room for it.
    """
    path = _free(shelf, tasks, name)
    _, need = planning.here(recipe, machine)
    if problem := need.problem(devices()):
        raise FinetuneError(problem)
    arguments = planning.launch_words(word, words, machine, shown(path))
    task = tasks.add("launch", arguments, name, Run(path).log, need, job)
    tasks.advance()
    return task


def _free(shelf: Shelf, tasks: Tasks, name: str) -> Path:
    """The folder of a new run; raises FinetuneError if its name is taken or not plain."""
    path, parts = shelf.root / name, Path(name).parts
    hidden = any(part.startswith(".") for part in parts)
    if not parts or Path(name).is_absolute() or hidden or "\0" in name or len(parts) > 2:
        raise FinetuneError(f"name of the run: got '{name}', expected a plain name")
    launches = [task for task in tasks.of(name) if task.verb == "launch" and not task.ended]
    if path.exists() or launches:
        raise FinetuneError(f"{name}: exists already; choose another name for the run")
    return path


def start_chain(shelf: Shelf, tasks: Tasks, sent: Words) -> str:
    """Queue a chain of recipes; returns the page of its first stage.

    Raises:
        FinetuneError: a recipe is not known, or the name is taken or not plain.
    """
    name = first(sent, "name")
    origins = [origin(shelf, tasks, each) for each in sent.get("recipe", []) if each]
    path = _free(shelf, tasks, name)
    found = stages(path, [each.word for each in origins], [])
    needs = [planning.here(each.recipe, planning.Machine())[1] for each in origins]
    need = max(needs, key=lambda each: each.bytes * each.processes)
    words = ["launch", *(each.word for each in origins), "--chain", name, "--output", shown(path)]
    run = str(found[0].run.root.relative_to(shelf.root))
    tasks.add("launch", words, run, found[0].run.log, need)
    tasks.advance()
    return f"/run?{urlencode({'run': run})}"


def make_recipe(tasks: Tasks, name: str, model: str, data: Path, *more: str) -> str:
    """A recipe for data and a model by `finetune init`; returns its name in an address.

    Raises:
        FinetuneError: with what `finetune init` said.
    """
    if not model.strip():
        raise FinetuneError("model: name the model to train, by its folder or on the hub")
    folder = tasks.home / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    known = recipes(tasks)
    stem = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in known)
    path = path_of(str(folder / f"{stem}.yaml"))
    run_command("init", str(path), "--model", model.strip(), "--data", str(data.resolve()), *more)
    return f"file:{stem}"


def run_command(*words: str) -> str:
    """The output of a command that ends by itself.

    Raises:
        FinetuneError: with what it said, if it failed.
    """
    try:
        done = subprocess.run(
            interpreter.python("-m", "finetune", *words),
            capture_output=True, text=True, timeout=SECONDS_OF_A_COMMAND, check=False,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FinetuneError(f"{command(words)}: took over {SECONDS_OF_A_COMMAND:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise FinetuneError(*(line.removeprefix("error: ") for line in said[-20:]))
    return done.stdout
