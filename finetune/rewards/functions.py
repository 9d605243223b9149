"""Find the functions that a recipe's rewards name, and check their arguments."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from finetune import extensions
from finetune.errors import FinetuneError, refuse
from finetune.planner.shapes.config_files import has_score_head
from finetune.rewards import REWARDS, Reward
from finetune.rewards.builtin import check_arguments
from finetune.runs.run import Run, read_object

MODEL = "finetune.inference.score:reward_model"
"""Function that scores with a reward model."""
PREPARE = "finetune.inference.score:prepare"
"""Function that loads a reward model."""
GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that are available to every function."""


def function_of(reward: Reward) -> Callable[..., Any]:
    """The function of a reward.

    Raises:
        FinetuneError: it cannot be imported or called, or does not take the recipe's arguments.
    """
    field = "reward_funcs"
    if is_model(reward):
        refuse_other_model(reward)
        found = functools.partial(extensions.find(field, MODEL, {}), model=reward.function)
    else:
        found = extensions.find(field, reward.function, REWARDS)
    prefix = f"{field}: '{reward.function}'"
    if not callable(found):
        raise FinetuneError(f"{prefix} is not a function")
    wrong = _unsuitable(found)
    if wrong:
        raise FinetuneError(f"{prefix} {wrong}")
    takes, any_name = _parameters(found)
    given = [name for name in reward.arguments if name in GIVEN]
    if given:
        raise FinetuneError(
            f"{prefix}: its `arguments` have '{given[0]}', which is passed to every reward; leave "
            "it out"
        )
    unknown = [name for name in reward.arguments if name not in takes and not any_name]
    if unknown:
        raise FinetuneError(
            f"{prefix} takes no argument '{unknown[0]}' (it takes {', '.join(takes) or 'none'})"
        )
    if reward.function in REWARDS:
        check_arguments(reward.function, reward.arguments)
    return found


def _unsuitable(function: Callable[..., Any]) -> str:
    """Why a callable cannot be a reward, found without calling it; empty if it can."""
    if inspect.isclass(function):
        return "is a class; name a function, or an instance with __call__"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is an async function, which returns no scores; use asyncio.run inside a plain one"
    if inspect.isgeneratorfunction(function):
        return "is a generator, because it contains yield; return a list"
    try:
        named = _parameters(function) != ({}, False)
    except ValueError:
        named = False  # Python cannot read the signature of some built-in functions
    return "" if named else "takes no named argument, such as completions; use a function that does"


def is_model(reward: Reward) -> bool:
    """Whether a reward names a folder rather than a function."""
    name = reward.function
    if name in REWARDS or (":" in name and not os.path.exists(name)):
        return False
    return "/" in name or os.sep in name or os.path.isdir(name)


def prepare(reward: Reward) -> None:
    """Load the reward model, if the reward is a model."""
    if is_model(reward):
        extensions.find("reward_funcs", PREPARE, {})(reward.function)


def refuse_other_model(reward: Reward) -> None:
    """Refuse a folder that does not contain a reward model.

    Raises:
        FinetuneError: with what the folder contains.
    """
    folder, prefix = Path(reward.function), f"reward_funcs: '{reward.function}'"
    if not folder.is_dir():
        raise FinetuneError(f"{prefix}: the folder does not exist; name the run of a reward model")
    run = Run(folder)
    if run.recipe.is_file():
        method = read_object(run.recipe).get("method")
        if method != "reward":
            raise FinetuneError(
                f"{prefix}: a run of method {method}, expected one of method reward"
            )
        if run.newest() is None:
            raise FinetuneError(f"{prefix}: a run without a checkpoint; train it first")
        return
    fields = read_object(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise FinetuneError(
            f"{prefix}: an adapter without its base; name its run, or its export with --merge"
        )
    if not has_score_head(fields):
        raise FinetuneError(
            f"{prefix}: neither a run nor a folder with a complete reward model (architectures in "
            f"config.json: {fields.get('architectures')}); name a run of method reward, or its "
            "export with --merge"
        )


def arguments_of(reward: Reward, function: Callable[..., Any], columns: Iterable[str]) -> set[str]:
    """Names of the columns and other available arguments to pass to a function.

    Raises:
        FinetuneError: a required argument is not available.
    """
    takes, any_name = _parameters(function)
    there = {*GIVEN, *columns}
    needed = [name for name, is_needed in takes.items() if is_needed]
    missing = [name for name in needed if name not in there and name not in reward.arguments]
    if missing:
        known = ", ".join(sorted(there - {*GIVEN, "prompt"})) or "none"
        raise FinetuneError(
            f"reward_funcs: '{reward.function}' needs '{missing[0]}', which is neither a column "
            f"of the data (there are: {known}) nor among its `arguments` in the recipe"
        )
    return there if any_name else there & takes.keys()


def problems(rewards: Iterable[Reward], columns: Iterable[str] | None = None) -> list[str]:
    """Reasons why functions cannot be used, or lack a column, found before anything is loaded."""
    there, found = None if columns is None else list(columns), list[str]()
    for reward in rewards:
        try:
            function = function_of(reward)
            if there is not None:
                arguments_of(reward, function, there)
        except FinetuneError as error:
            found += error.problems
    return list(dict.fromkeys(found))


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Refuse rewards that need a column that no row has.

    Raises:
        FinetuneError: with every such reward.
    """
    refuse(problems(rewards, columns))


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Argument names with whether each is required, and whether any other name is accepted."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        each.name: each.default is each.empty
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return named, any(each.kind is each.VAR_KEYWORD for each in parameters)
