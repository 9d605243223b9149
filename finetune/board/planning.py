"""The plan beside a recipe's form, on this machine or a named one, as values for a page."""

import dataclasses
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from finetune import backend as backends
from finetune.board.devices import Need, devices, need_of
from finetune.board.tasks import Words, command, first
from finetune.errors import FinetuneError, problems
from finetune.models.starting_adapter import complete_adapter
from finetune.planner.estimate import advice, choice, fewest_changes, memory, wording
from finetune.planner.estimate.plan_api import described
from finetune.planner.estimate.predict import model_source, predict, workload_of
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.plan import Plan, plan
from finetune.recipe import Recipe
from finetune.runs import units

PARTS = ("timeline", "changes", "time", "reason", "ranked")
"""Parts of a page that a plan may not have."""
SHOWN = 6
"""Backends of a ranking."""
Count = Annotated[int, Field(ge=1, le=4096)]


@dataclass(frozen=True)
class Machine:
    """What the form says about where to train."""

    backend: str = ""
    """Empty for the recipe's, or the first of the ranking."""
    gpu: str = ""
    """Empty for this machine."""
    gpus: Count = 1
    nodes: Count = 1
    price: Annotated[float, Field(ge=0)] | None = None

    @property
    def words(self) -> list[str]:
        """The options of `finetune launch`."""
        found = ["--backend", self.backend] if self.backend else []
        return found + (["--processes", str(self.gpus)] if self.gpus > 1 else [])


MACHINE = [field.name for field in dataclasses.fields(Machine)]


def machine_of(form: Words) -> Machine:
    """The machine of a form; raises FinetuneError if a number is not one, or out of range."""
    given = {name: value for name in MACHINE if (value := first(form, name))}
    try:
        return TypeAdapter(Machine).validate_strings(given)
    except ValidationError as error:
        raise FinetuneError(*problems(error, Machine, "machine")) from None


def here(recipe: Recipe, machine: Machine) -> tuple[Plan, Need]:
    """The plan of a launch on this machine, and what it needs.

    Raises:
        FinetuneError: the recipe cannot run on the backend.
    """
    recipe = complete_adapter(recipe)
    chosen = backends.load(machine.backend or recipe.backend)
    chosen, count = backends.divided(chosen, machine.gpus if machine.gpus > 1 else None, {})
    chosen = backends.sized(chosen, count)
    planned = plan(recipe, chosen, count)
    return planned, need_of(planned, devices())


def shown(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """The values of the plan's part of the page: the plan, the moments of a step, their room.

    Raises:
        FinetuneError: the recipe cannot run, or the machine is not known.
    """
    if machine.gpu:
        return _there(complete_adapter(recipe), machine)
    planned, need = here(recipe, machine)
    available = devices()
    is_cpu = available[0].kind == "cpu"
    problem = need.problem(available)
    room = max(one.bytes for one in available) / (need.processes if is_cpu else 1)
    found = {"planned": planned, "room": room, "fits": problem is None, "device": None}
    try:
        work = workload_of(planned, model_source(planned.recipe).shape)
    except FinetuneError as error:
        return found | {"verdict": problem or f"memory is not predicted: {error}"}
    timeline = memory.timeline(dataclasses.replace(work, cpu=is_cpu))
    fits = f"fits: {units.size(timeline.peak.total)} of tensors a process"
    return found | {"verdict": problem or fits, "timeline": timeline}


def _there(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """The best backend on a named machine, or the given one, and the ranking."""
    place = described(machine.gpu, machine.gpus, machine.nodes, price=machine.price)
    assert place is not None
    words = list[str]()
    precision: backends.Precision = "bf16"
    options = choice.candidates(recipe, place, precision)
    ranked = choice.allowed(recipe, advice.rank(options), precision)
    if machine.backend:
        planned = plan(recipe, choice.on(place, machine.backend), place.count, precision)
    else:
        best = ranked[0] if ranked else min(options, key=lambda each: each.peak.total)
        backend = choice.backend_of(best, place, precision)
        chosen, more = choice.chosen(recipe, best)
        words = ["--backend", best.name, *" ".join(more).split()]
        planned = plan(chosen, backend, place.count, precision)
    found = predict(planned, place, local_rows(recipe))
    changes = [] if found.status != "no" else fewest_changes.changes(
        found.workload, place, precision
    )  # fmt: skip
    return {
        "planned": planned, "words": words, "room": found.usable, "device": "cuda",
        "fits": found.status != "no",
        "verdict": wording.verdict(found).split("\n")[0], "timeline": found.timeline,
        "changes": wording.what_to_change(changes) if changes else "",
        "time": wording.time(found).strip(),
        "reason": advice.reason(ranked[0], options) if ranked else "",
        "ranked": sorted(
            {each.words: each for each in reversed(ranked)}.values(), key=ranked.index
        )[:SHOWN],
    }  # fmt: skip


def launch_words(recipe: str, changed: list[str], machine: Machine, output: str) -> list[str]:
    """The arguments of `finetune` that start a run here."""
    return ["launch", recipe, *changed, *machine.words, "--output", output]


def copied(recipe: str, changed: list[str], machine: Machine) -> str:
    """The command that plans the same on a named machine."""
    given = {name: value for name in MACHINE if (value := getattr(machine, name)) not in ("", None)}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return command(["plan", recipe, *changed, *options])
