"""The plan beside a recipe's form, on this machine or a named one, as values for a page."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from finetune import backend as backends
from finetune import catalog
from finetune.board.devices import Need, devices, need_of
from finetune.errors import FinetuneError
from finetune.models.starting_adapter import complete_adapter
from finetune.planner.estimate import advice, choice, fewest_changes, hardware, memory, wording
from finetune.planner.estimate.moments import Timeline
from finetune.planner.estimate.plan_api import described
from finetune.planner.estimate.predict import model_source, predict, workload_of
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.plan import Plan, plan
from finetune.recipe import Recipe
from finetune.runs import units

SHOWN = 6
"""Backends of a ranking."""
MOST_PROCESSES = 4096


class Machine(NamedTuple):
    """What the form says about where to train."""

    backend: str = ""
    """Empty for the recipe's, or the first of the ranking."""
    gpu: str = ""
    """Empty for this machine."""
    gpus: int = 1
    nodes: int = 1
    price: float | None = None

    @property
    def words(self) -> list[str]:
        """The options of `finetune launch`."""
        found = ["--backend", self.backend] if self.backend else []
        return found + (["--processes", str(self.gpus)] if self.gpus > 1 else [])


def machine_of(form: Mapping[str, list[str]]) -> Machine:
    """The machine of a form.

    Raises:
        FinetuneError: a number is not one, or out of range.
    """

    def number(name: str) -> int:
        text = form.get(name, ["1"])[0].strip() or "1"
        if not text.isdecimal() or not 1 <= int(text) <= MOST_PROCESSES:
            raise FinetuneError(f"{name}: got '{text}', expected a number from 1 on")
        return int(text)

    price = form.get("price", [""])[0].strip()
    try:
        cost = float(price) if price else None
    except ValueError:
        raise FinetuneError(f"price: got '{price}', expected a number") from None
    backend, gpu = (form.get(name, [""])[0].strip() for name in ("backend", "gpu"))
    return Machine(backend, gpu, number("gpus"), number("nodes"), cost)


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
    """The values of the plan's part of the page.

    Raises:
        FinetuneError: the recipe cannot run, or the machine is not known.
    """
    if machine.gpu:
        return _there(complete_adapter(recipe), machine)
    planned, need = here(recipe, machine)
    available = devices()
    found = _page(planned, None)
    problem = need.problem(available)
    try:
        work = workload_of(planned, model_source(planned.recipe).shape)
    except FinetuneError as error:
        return found | {"unknown": str(error)}
    is_cpu = available[0].kind == "cpu"
    timeline = memory.timeline(dataclasses.replace(work, cpu=is_cpu))
    room = max(one.bytes for one in available) / (need.processes if is_cpu else 1)
    what = "a process" if is_cpu else available[0].name
    verdict = problem or f"fits: {units.size(timeline.peak.total)} of tensors for {what}"
    return found | {
        "verdict": verdict, "fits": problem is None, "bars": bars(timeline, room), "room": room,
    }  # fmt: skip


def _there(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    place = described(machine.gpu, machine.gpus, machine.nodes, price=machine.price)
    assert place is not None
    precision: backends.Precision = "bf16"
    options = choice.candidates(recipe, place, precision)
    whole = advice.rank(options)
    ranked = choice.allowed(recipe, whole, precision)
    if not ranked:
        least = min(options, key=lambda each: each.peak.total)
        changes = fewest_changes.changes(least.workload, place, precision)
        lines = wording.what_to_change(changes).split("\n")
        needs, room = wording.size(least.peak.total), wording.size(least.usable)
        return {
            "verdict": f"nothing fits: the smallest is {least.name} with {needs} of {room}",
            "fits": False, "changes": lines, "bars": [], "ranking": [], "time": "", "unknown": "",
            "reason": "", "explained": "",
        }  # fmt: skip
    if machine.backend:
        planned = plan(recipe, choice.on(place, machine.backend), place.count, precision)
    else:
        chosen, _ = choice.chosen(recipe, ranked[0])
        backend = choice.backend_of(ranked[0], place, precision)
        planned = plan(chosen, backend, place.count, precision)
    found = predict(planned, place, local_rows(recipe))
    changes = list[str]()
    if found.status == "no":
        lines = fewest_changes.changes(found.workload, place, precision)
        changes = wording.what_to_change(lines).split("\n")
    return _page(planned, "cuda") | {
        "verdict": wording.verdict(found).split("\n")[0],
        "fits": found.status != "no",
        "changes": changes,
        "bars": bars(found.timeline, found.usable),
        "room": found.usable,
        "time": wording.time(found).strip(),
        "reason": advice.reason(ranked[0], options),
        "ranking": [
            {
                "name": each.words, "status": each.status, "bytes": each.peak.total,
                "rows": each.workload.micro_rows, "speed": each.speed,
                "words": " ".join(choice.chosen(recipe, each)[1]),
            }
            for each in _first_of_each(ranked)[:SHOWN]
        ],
    }  # fmt: skip


def _first_of_each(ranked: list[advice.Option]) -> list[advice.Option]:
    """The best option of each backend, in their order."""
    found: dict[str, advice.Option] = {}
    for each in ranked:
        found.setdefault(each.words, each)
    return list(found.values())


def _page(planned: Plan, device: Any) -> dict[str, Any]:
    return {
        "backend": planned.backend.name, "explained": planned.explain(device), "verdict": "",
        "fits": True, "bars": [], "ranking": [], "changes": [], "time": "", "unknown": "",
        "reason": "",
    }  # fmt: skip


def bars(timeline: Timeline, room: float) -> list[dict[str, Any]]:
    """The moments of a step: name, bytes, share of the room, and the largest parts."""
    peak = timeline.peak
    return [
        {
            "name": moment.name, "bytes": moment.total, "share": moment.total / room,
            "peak": moment.total == peak.total,
            "parts": ", ".join(
                f"{name} {units.size(count)}"
                for name, count in sorted(moment.parts.items(), key=lambda part: -part[1])[:4]
                if count
            ),
        }
        for moment in timeline.moments
    ]  # fmt: skip


def launch_words(recipe: str, changed: list[str], machine: Machine, output: str) -> list[str]:
    """The arguments of `finetune` that start a run here."""
    return ["launch", recipe, *changed, *machine.words, "--output", output]


def copied(recipe: str, changed: list[str], machine: Machine) -> str:
    """The command that plans the same on a named machine."""
    words = ["finetune", "plan", recipe, *changed, "--gpu", machine.gpu]
    words += ["--gpus", str(machine.gpus)] if machine.gpus > 1 else []
    words += ["--nodes", str(machine.nodes)] if machine.nodes > 1 else []
    return shlex.join(words + (["--backend", machine.backend] if machine.backend else []))


GPUS = list(hardware.GPUS)
BACKENDS = backends.names
RECIPES = catalog.names
