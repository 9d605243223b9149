"""Reward functions by name, and the recipe section that selects one."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from finetune.errors import Checked
from finetune.recipe import STRICT, Text

REWARDS: dict[str, str] = {
    "exact_match": "finetune.rewards.builtin:exact_match",
    "json_valid": "finetune.rewards.builtin:json_valid",
    "json_fields": "finetune.rewards.builtin:json_fields",
    "regex": "finetune.rewards.builtin:regex",
    "length": "finetune.rewards.builtin:length",
}
"""Built-in reward functions by their names in a recipe."""


@dataclass(frozen=True, config=STRICT)
class Reward(metaclass=Checked):
    """A function or a model that scores completions, with the weight of its scores."""

    function: Text
    """A built-in reward, your own `module:function`, or the run of a reward model."""
    weight: float = 1.0
    """Factor of its scores in the sum over all rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments in addition to prompts, completions and the columns of the data."""

    @property
    def name(self) -> str:
        """Name in metrics: the function's name, or the folder name of a run."""
        return re.split(r"[:/\\]", self.function.rstrip("/\\"))[-1]


def names(rewards: Sequence[Reward]) -> list[str]:
    """Names of rewards in metrics; repeated names get a numeric suffix."""
    found = [reward.name for reward in rewards]
    return [
        f"{name}_{found[:i].count(name) + 1}" if found.count(name) > 1 else name
        for i, name in enumerate(found)
    ]


def _sections(value: Any) -> Any:
    """Convert plain names to sections."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return tuple({"function": each} if isinstance(each, str) else each for each in value)


Rewards = Annotated[tuple[Reward, ...], BeforeValidator(_sections)]
