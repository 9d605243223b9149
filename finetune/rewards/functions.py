"""The functions that a recipe's rewards name, and the arguments that each is given."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from finetune import extensions
from finetune.errors import FinetuneError
from finetune.rewards import REWARDS, Reward

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that every function may take."""


def function_of(reward: Reward) -> Callable[..., Any]:
    """The function of a reward.

    Raises:
        FinetuneError: it cannot be imported or called, or takes other arguments than the recipe's.
    """
    field = "reward_funcs"
    found = extensions.find(field, reward.function, REWARDS)
    if not callable(found):
        raise FinetuneError(f"{field}: '{reward.function}' is not a function")
    takes, any_name = _parameters(found)
    unknown = [name for name in reward.arguments if name not in takes and not any_name]
    if unknown:
        raise FinetuneError(
            f"{field}: '{reward.function}' takes no argument '{unknown[0]}' (it takes "
            f"{', '.join(takes)})"
        )
    return found


def arguments_of(reward: Reward, function: Callable[..., Any], columns: Iterable[str]) -> set[str]:
    """Names of what a function is given besides its own arguments.

    Raises:
        FinetuneError: it needs an argument that nothing gives.
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


def problems(rewards: Iterable[Reward]) -> list[str]:
    """Why functions cannot be used, before anything is loaded."""
    found: list[str] = []
    for reward in rewards:
        try:
            function_of(reward)
        except FinetuneError as error:
            found += error.problems
    return found


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Names that a function takes, each with whether it has no default; whether it takes any."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        each.name: each.default is each.empty
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return named, any(each.kind is each.VAR_KEYWORD for each in parameters)
