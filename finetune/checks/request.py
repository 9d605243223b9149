"""Check a request before anything is loaded: its plan, and what it names.

Does not import torch, so that a misspelled path is reported without waiting seconds for the import.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune import backend as backends
from finetune import catalog
from finetune.checks.files import FILES, NEEDED, formats, missing_files, raised
from finetune.errors import FinetuneError, problems_of, refuse
from finetune.models import starting_adapter
from finetune.planner import Plan, library_limits, plan
from finetune.planner.engines import TRAITS
from finetune.planner.shapes.approximate import kept
from finetune.planner.shapes.config_files import fields_of
from finetune.process import rendezvous
from finetune.process.quiet import forget_launch
from finetune.recipe import Recipe


def read_words(recipe: str, overrides: Sequence[str], backend: str | None) -> Recipe:
    """The recipe of a name and overrides; also checks the name of the backend, if one is given.

    Raises:
        FinetuneError: with every mistake in the arguments.
    """
    problems = [] if backend is None else raised(lambda: backends.load(backend))
    try:
        found = catalog.resolve(recipe, overrides)
    except FinetuneError as error:
        raise FinetuneError(*error.problems, *problems) from None
    refuse(problems)
    return found


def check(
    recipe: Recipe,
    machine: backends.Backend,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    files: bool = True,
) -> Plan:
    """The plan of a recipe, after checking its formats and, with `files`, its data and model.

    A recipe that starts from an adapter gets that adapter's section.

    Raises:
        FinetuneError: with every problem of the plan, the formats and the files.
    """
    problems: list[str] = []
    try:
        recipe = starting_adapter.complete_adapter(recipe)
    except FinetuneError as error:
        problems += error.problems
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, adapter=None))
    problems += problems_of((*(FILES if files else (formats,)), misnamed), recipe)
    try:
        planned = plan(recipe, machine, processes, precision)
    except FinetuneError as error:
        raise FinetuneError(*error.problems, *problems) from None
    refuse([*problems, *(problems_of(NEEDED, planned) if files else ())])
    return planned


def misnamed(recipe: Recipe) -> Iterator[str]:
    """adapter.targets and its other names: they match no module; use one of those listed."""
    # The model is built without weights if the formulas do not know every name.
    adapter, fields = recipe.adapter, fields_of(recipe)
    if adapter is None or recipe.model.adapter is not None or not fields:
        return
    if recipe.model.trust_remote_code and fields.get("auto_map"):
        return  # the code is loaded with the weights
    if library_limits.unfit(recipe, fields) or library_limits.names_only_matrices(adapter, fields):
        return
    from finetune.models import adapters, shell

    try:
        model = shell.from_fields(recipe, fields)
    except Exception:  # any error of the model's code; reported when the model is loaded
        return
    try:
        yield from adapters.misnamed(model, adapter)
    except re.error:
        return  # reported by the plan


def below_a_plan(recipe: Recipe) -> Iterator[str]:
    """Lines below a printed plan: which experts are adapted, and missing files."""
    fields = fields_of(recipe)
    if recipe.adapter is not None and library_limits.expert_count(fields) > 1:
        asked = {"adapter": recipe.adapter, "quantization": recipe.model.quantization}
        for note in kept({**fields, **asked}, "notes", lambda: _composed(recipe, fields)):
            yield f"note         {note}"
    if recipe.model.reads:
        from finetune.checks import images

        yield from images.planned(recipe)
    for problem in missing_files(recipe):
        yield f"not here     {problem}"


def _composed(recipe: Recipe, fields: Mapping[str, Any]) -> list[str]:
    from finetune.models import composition  # imports torch and peft

    return composition.planned(recipe, fields)


def check_here(
    recipe: Recipe, backend: str | None = None, precision: backends.Precision | None = None
) -> Plan:
    """The plan of this process: as `accelerate launch` started it, otherwise a single process.

    Raises:
        FinetuneError: as `check` does, or the backend needs processes that were not started.
    """
    launched = backends.launched()
    if launched is not None:
        return check(recipe, _as_named(launched, backend), launched.processes, precision)
    machine = backends.load(backend or recipe.backend)
    several = not TRAITS[machine.engine].alone
    count = rendezvous.started(named=several and backend is not None)
    if count is not None:
        nodes = max(1, count // rendezvous.neighbours())
        machine = backends.sized(machine if several else backends.load("ddp"), count, nodes)
        return check(recipe, machine, count, precision)
    if backend is not None and several:
        raise FinetuneError(
            f"--backend {machine.name}: `finetune train` starts one process; start several with "
            f"`finetune launch --backend {machine.name}`, `torchrun --nproc-per-node 2 -m finetune "
            f"train`, or `accelerate launch --config_file {machine.path} -m finetune train`"
        )
    forget_launch()
    return check(recipe, backends.load(backend or "single"), 1, precision)


def _as_named(launched: backends.Backend, name: str | None) -> backends.Backend:
    """The backend that `accelerate launch` started; `name` may repeat it.

    Raises:
        FinetuneError: `name` is another backend.
    """
    if name is None:
        return launched
    asked = backends.load(name)
    if asked.shard_size is not None and launched.shard_size is not None:
        asked = dataclasses.replace(asked, shard_size=launched.shard_size)
    if asked.axes.sizes.keys() == launched.axes.sizes.keys():  # sizes may differ from the file
        asked = dataclasses.replace(asked, axes=launched.axes)
    differing = [each for each in asked.same_as(launched) if not each.startswith("precision")]
    if differing:
        raise FinetuneError(
            f"--backend {name}: accelerate launch started another one ({'; '.join(differing)}); "
            f"give it --config_file {asked.path}, or omit --backend"
        )
    return launched
