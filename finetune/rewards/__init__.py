"""Rewards by name: functions of prompts and completions that give a number for each."""

import re
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
"""Names that a recipe may use, and the functions that they stand for."""


@dataclass(frozen=True, config=STRICT)
class Reward(metaclass=Checked):
    """A function or a model that scores completions, and how much its score counts."""

    function: Text
    """A built-in reward, `module:function` of your own, or the run of a reward model."""
    weight: float = 1.0
    """Factor of its scores in the sum over all rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments besides prompts, completions and the columns of the data."""

    @property
    def name(self) -> str:
        """What metrics call it: of a run the folder's name."""
        return re.split(r"[:/\\]", self.function.rstrip("/\\"))[-1]


def _sections(value: Any) -> Any:
    """Names alone as sections."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return tuple({"function": each} if isinstance(each, str) else each for each in value)


Rewards = Annotated[tuple[Reward, ...], BeforeValidator(_sections)]
