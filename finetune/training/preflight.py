"""Check a request before anything is loaded: the plan, and the files that a recipe names.

Does not import torch, so that a misspelled path is reported without waiting seconds for the import.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from finetune import backend as backends
from finetune import catalog
from finetune.checkpoints.base_weights import codes_read_as_weights, weight_files
from finetune.data.formats import find_format
from finetune.data.read.sources import HUB_NAME, find_sources
from finetune.errors import FinetuneError
from finetune.methods.online import Online
from finetune.models import starting_adapter
from finetune.planner import Plan, limits, plan
from finetune.planner.engines import TRAITS
from finetune.planner.shapes.config_files import fields_of
from finetune.process import rendezvous
from finetune.process.quiet import forget_launch
from finetune.recipe import Model, Recipe
from finetune.rewards.functions import problems as reward_problems
from finetune.version import install, missing


def read_words(recipe: str, overrides: Sequence[str], backend: str | None) -> Recipe:
    """The recipe of a name and overrides; also checks the name of the backend, if one is given.

    A recipe that starts from an adapter gets that adapter's section.

    Raises:
        FinetuneError: with every mistake in the arguments.
    """
    problems = [] if backend is None else _problems_of(lambda: backends.load(backend))
    try:
        found = starting_adapter.complete_adapter(catalog.resolve(recipe, overrides))
    except FinetuneError as error:
        raise FinetuneError(*error.problems, *problems) from None
    if problems:
        raise FinetuneError(*problems)
    return found


def check(
    recipe: Recipe,
    machine: backends.Backend,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    files: bool = True,
) -> Plan:
    """The plan of a recipe, after checking its formats and, with `files`, its data and model.

    Raises:
        FinetuneError: with every problem of the plan, the formats and the files.
    """
    problems: list[str] = []
    try:
        recipe = starting_adapter.complete_adapter(recipe)
    except FinetuneError as error:
        problems += error.problems
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, adapter=None))
    if files:
        problems += missing_files(recipe)
    else:
        for data in (*recipe.data, *recipe.eval_data):
            problems += _problems_of(lambda name=data.format: find_format(name))
    problems += misnamed(recipe)
    try:
        planned = plan(recipe, machine, processes, precision)
    except FinetuneError as error:  # both checks find some problems
        raise FinetuneError(*dict.fromkeys((*error.problems, *problems))) from None
    problems += _missing_packages(planned) if files else []
    problems += _rewards(recipe) if files else []
    if problems:
        raise FinetuneError(*problems)
    return planned


def misnamed(recipe: Recipe) -> list[str]:
    """Names in a new adapter that match no module, as problems.

    The model is built without weights if the formulas do not know every name.
    """
    adapter, fields = recipe.adapter, fields_of(recipe)
    if adapter is None or recipe.model.adapter is not None or not fields:
        return []
    if recipe.model.trust_remote_code and fields.get("auto_map"):
        return []  # the code is loaded with the weights
    unfit = [*limits.architecture(recipe, fields)]
    if unfit or limits.names_only_matrices(adapter, fields):
        return []
    from finetune.models import adapters, shell

    try:
        model = shell.from_fields(recipe, fields)
    except Exception:  # any error of the model's code; reported when the model is loaded
        return []
    try:
        return [*adapters.misnamed(model, adapter)]
    except re.error:
        return []  # reported by the plan


def _rewards(recipe: Recipe) -> list[str]:
    """Problems of an online method's reward functions, which are imported here."""
    if not isinstance(recipe, Online):
        return []
    return reward_problems((*recipe.reward_funcs, *recipe.eval_reward_funcs))


def _missing_packages(planned: Plan) -> list[str]:
    """Extras that the plan needs and that are not installed, as problems."""
    machine, recipe = planned.backend, planned.recipe
    found: list[str] = []
    package = TRAITS[machine.engine].package
    if package is not None and importlib.util.find_spec(package.lower()) is None:
        found.append(f"backend: {machine.name} needs {missing(package)}")
    if importlib.util.find_spec("bitsandbytes") is None:
        taught_by = recipe.taught_by
        stored = {
            "model.quantization": recipe.model.quantization,
            "teacher.quantization": "none" if taught_by is None else taught_by.quantization,
            "optim.name": recipe.optim.name if recipe.optim.name.startswith("paged") else "none",
        }
        found += [
            f"{field}: {name} needs {missing('bitsandbytes')}"
            for field, name in stored.items()
            if name != "none"
        ]
    return found


def below_a_plan(recipe: Recipe) -> Iterator[str]:
    """Lines below a printed plan: which experts are adapted, and missing files."""
    fields = fields_of(recipe)
    if recipe.adapter is not None and limits.expert_count(fields) > 1:
        from finetune.models import composition

        for note in composition.planned(recipe, fields):
            yield f"note         {note}"
    for problem in missing_files(recipe):
        yield f"not here     {problem}"


def check_files(recipe: Recipe) -> None:
    """Refuse a recipe whose data or model is missing.

    Raises:
        FinetuneError: with every problem.
    """
    problems = missing_files(recipe)
    if recipe.model.name is None and recipe.model.tokenizer is None:
        problems.append("model: set model.name or model.tokenizer; the data needs a tokenizer")
    if problems:
        raise FinetuneError(*problems)


def missing_files(recipe: Recipe) -> list[str]:
    """Problems of files and packages missing on this machine; hub names are not looked up."""
    missing = _problems_of(lambda: find_sources(recipe)) if recipe.data else []
    return [*_missing_folders(recipe.model), *missing, *_missing_trackers(recipe)]


def _missing_trackers(recipe: Recipe) -> list[str]:
    return [
        f"trackers: '{name}' is not installed; run: "
        + (install("trackers") if name == "tensorboard" else f"pip install {name}")
        for name in recipe.trackers
        if importlib.util.find_spec(name) is None
    ]


def _problems_of(look: Callable[[], object]) -> list[str]:
    try:
        look()
    except FinetuneError as error:
        return list(error.problems)
    return []


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


def _not_a_model(folder: Path) -> list[str]:
    """Problems of a folder as `model.name`: it holds no model, or an adapter instead."""
    config = folder / starting_adapter.CONFIG
    if config.is_file():
        fields = _problems_of(lambda: starting_adapter.read_config(folder))
        base = (
            "ITS_BASE"
            if fields
            else starting_adapter.read_config(folder).get("base_model_name_or_path")
        )
        return [
            f"model.name: {folder} contains an adapter, not a model; to train it further, set "
            f"model.name={base} model.adapter={folder}"
        ]
    if (folder / "config.json").is_file():
        missing = [each.name for each in weight_files(folder) if not each.is_file()]
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        codes = codes_read_as_weights(str(folder))
        return [
            f"model.name: {folder} lacks {name}{more}, which its index of the weights names; copy "
            "the folder again"
            for name in missing[:1]
        ] + [f"model.name: {folder}: {each}" for each in [codes] if each is not None]
    if (folder / "recipe.json").is_file():
        return []  # a run is resolved by `starting_run`
    return [f"model.name: the folder {folder} contains no model (no config.json)"]


def _missing_folders(model: Model) -> list[str]:
    """Problems of names that are neither a folder nor a valid hub id."""
    named = {"model.name": model.name, "model.tokenizer": model.tokenizer}
    problems: list[str] = []
    for field, name in named.items():
        if name is None or os.path.isdir(name):  # a name may be too long for `Path.is_dir`
            if field == "model.name" and name:
                problems += _not_a_model(Path(name))
        elif os.path.isfile(name):
            problems.append(f"{field}: {name} is a file; give its folder")
        elif not HUB_NAME.fullmatch(name):
            problems.append(
                f"{field}: no such folder: {name}; give a folder with config.json, or a hub id "
                "such as HuggingFaceTB/SmolLM2-135M"
            )
    return problems
