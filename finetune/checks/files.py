"""Checks of what a request names: data, models, packages, functions; no hub is asked."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.backend import Backend
from finetune.checkpoints.base_weights import codes_read_as_weights, weight_files
from finetune.data.formats import find_format
from finetune.data.read.sources import HUB_NAME, find_sources
from finetune.errors import FinetuneError, problems_of, refuse
from finetune.methods.online import Online
from finetune.models import starting_adapter
from finetune.planner import Plan, data_rules
from finetune.planner.engines import TRAITS
from finetune.recipe import Recipe
from finetune.rewards.functions import problems as reward_problems
from finetune.runs.trackers import own_tracker
from finetune.version import install, missing


def raised(look: Callable[[], object]) -> list[str]:
    """The problems that a function raises."""
    try:
        look()
    except FinetuneError as error:
        return list(error.problems)
    return []


def data(recipe: Recipe) -> Iterator[str]:
    """data, eval_data: no such file, or not for this format or method; name a file, a format."""
    yield from raised(lambda: find_sources(recipe)) if recipe.data else []


def formats(recipe: Recipe) -> Iterator[str]:
    """data.format: no such format; name one of `finetune list`, or module:attribute."""
    for each in (*recipe.data, *recipe.eval_data):
        yield from raised(lambda name=each.format: find_format(name))


def model(recipe: Recipe) -> Iterator[str]:
    """model.name, model.tokenizer: no such folder; give one with config.json, or a hub id."""
    named = {"model.name": recipe.model.name, "model.tokenizer": recipe.model.tokenizer}
    for field, name in named.items():
        if name is None or os.path.isdir(name):  # a name may be too long for `Path.is_dir`
            continue
        if os.path.isfile(name):
            yield f"{field}: {name} is a file; give its folder"
        elif not HUB_NAME.fullmatch(name):
            yield (
                f"{field}: no such folder: {name}; give a folder with config.json, or a hub id "
                "such as HuggingFaceTB/SmolLM2-135M"
            )


def weights(recipe: Recipe) -> Iterator[str]:
    """model.name: its folder holds no model, an adapter, or damaged weights; copy it again."""
    folder = Path(recipe.model.name or "")
    if not recipe.model.name or not os.path.isdir(recipe.model.name):
        return
    if (folder / starting_adapter.CONFIG).is_file():
        base: object = "ITS_BASE"
        with contextlib.suppress(FinetuneError):
            base = starting_adapter.read_config(folder).get("base_model_name_or_path")
        yield (
            f"model.name: {folder} contains an adapter, not a model; to train it further, set "
            f"model.name={base} model.adapter={folder}"
        )
    elif (folder / "config.json").is_file():
        missing = [each.name for each in weight_files(folder) if not each.is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            yield (
                f"model.name: {folder} lacks {missing[0]}{more}, which its index of the weights "
                "names; copy the folder again"
            )
        if codes := codes_read_as_weights(str(folder)):
            yield f"model.name: {folder}: {codes}"
    elif not (folder / "recipe.json").is_file():  # a run is resolved by `starting_run`
        yield f"model.name: the folder {folder} contains no model (no config.json)"


def trackers(recipe: Recipe) -> Iterator[str]:
    """trackers: the package of a tracker is not installed; run the command that is shown."""
    for name in recipe.trackers:
        if ":" in name:
            yield from raised(lambda name=name: own_tracker(name))
        elif importlib.util.find_spec(name) is None:
            how = install("trackers") if name == "tensorboard" else f"pip install {name}"
            yield f"trackers: '{name}' is not installed; run: {how}"


FILES = (weights, model, data, trackers)
"""Checks of a recipe."""


def engine_package(plan: Plan) -> Iterator[str]:
    """backend: the package of its engine is not installed; run the command that is shown."""
    if lacking := lacking_package(plan.backend):
        yield f"backend: {lacking}"


def lacking_package(machine: Backend) -> str | None:
    """The package that a backend needs and that is not installed, as text."""
    package = "DeepSpeed" if machine.axes.sequence > 1 else TRAITS[machine.engine].package
    if package is None or importlib.util.find_spec(package.lower()) is not None:
        return None
    return f"{machine.name} needs {missing(package)}"


def bitsandbytes(plan: Plan) -> Iterator[str]:
    """model.quantization, optim.name: bitsandbytes is not installed; install it."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    recipe, teacher = plan.recipe, plan.recipe.taught_by
    stored = {
        "model.quantization": recipe.model.quantization,
        "teacher.quantization": "none" if teacher is None else teacher.quantization,
        "optim.name": recipe.optim.name if recipe.optim.name.startswith("paged") else "none",
    }
    for field, name in stored.items():
        if name != "none":
            yield f"{field}: {name} needs {missing('bitsandbytes')}"


def rewards(plan: Plan) -> Iterator[str]:
    """reward_funcs: it cannot be imported here, or does not fit; name a function that does."""
    recipe = plan.recipe
    if isinstance(recipe, Online):
        yield from reward_problems((*recipe.reward_funcs, *recipe.eval_reward_funcs))


NEEDED = (engine_package, bitsandbytes, rewards)
"""Checks of a plan."""


def missing_files(recipe: Recipe) -> list[str]:
    """Every problem of what a recipe names; hub names are not looked up."""
    return problems_of(FILES, recipe)


def check_files(recipe: Recipe) -> None:
    """Refuse a recipe whose data cannot be read, for commands that make no plan.

    Raises:
        FinetuneError: with every problem.
    """
    found = [*problems_of(data_rules.RULES, recipe), *missing_files(recipe)]
    if recipe.model.name is None and recipe.model.tokenizer is None:
        found.append("model: set model.name or model.tokenizer; the data needs a tokenizer")
    refuse(found)
