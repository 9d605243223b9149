"""Predict the memory and the time of sampling, for methods that learn from completions.

Beside the weights a process holds the keys and values of every token of the completions that it
samples at once, and for each of them a few rows of the vocabulary: logits, their logarithms, and
noise in 64 bits.
"""

import dataclasses
import math

from finetune.planner.estimate.hardware import Machine
from finetune.planner.shapes.architecture import Architecture
from finetune.recipe import Recipe

OF_LOGITS = 4 + 4
"""Bytes of an entry of the vocabulary while noise is made: the logits, and those at temperature."""
OF_NOISE = 8 + 8
"""The same of the noise: four words of Philox for four entries, and what is made of them."""
ROOM = 12
"""Tokens by which the tensors of keys and values grow."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a process needs for a sampling, besides what it holds anyway."""

    rows: int
    """Completions at once."""
    tokens: int
    """Of a prompt and its completion, at most."""
    cache: float
    """Bytes of keys and values."""
    logits: float
    """Bytes of logits and noise."""
    seconds: float | None
    """At least: the weights are read once for every token of a batch, or multiplied."""

    @property
    def memory(self) -> float:
        """Bytes at the largest moment."""
        return self.cache + self.logits

    def summary(self) -> dict[str, float]:
        """For `plan.json`: by the names that the record measures them by."""
        found: dict[str, float] = {
            "sampling_memory": round(self.memory),
            "sampling_cache": round(self.cache),
        }
        return found if self.seconds is None else found | {"sampling_seconds": self.seconds}


def sampling(
    recipe: Recipe,
    shape: Architecture,
    processes: int,
    width: int,
    machine: Machine | None = None,
    tokens: int | None = None,
) -> Sampling | None:
    """What a recipe's samplings take; None for a method that learns from data alone.

    Args:
        recipe: with its completions.
        shape: of the model.
        processes: that share a sampling.
        width: bytes of a number that the model computes with.
        machine: for the time.
        tokens: of the longest prompt with its completion; by default all that may be.
    """
    if recipe.sampled is None:
        return None
    count, at_once, longest = recipe.sampled
    mine = math.ceil(count / processes)
    rows, tokens = min(mine, at_once), tokens or recipe.encoded_length + longest
    places = tokens - longest + (longest // (ROOM + 1) + 1) * (ROOM + 1)
    of_layer = 2 * shape.key * width * rows * places
    # Keys, then values, of one layer are copied when they grow.
    cache = of_layer * (shape.layers + 0.5)
    logits = rows * shape.vocab * (OF_LOGITS + OF_NOISE)
    seconds = None
    if machine is not None:
        reads = math.ceil(mine / rows) * longest * shape.parameters * width / machine.gpu.bandwidth
        products = 2 * shape.active_parameters * mine * longest / machine.gpu.flops
        seconds = max(reads, products)
    return Sampling(rows, tokens, cache, logits, seconds)
