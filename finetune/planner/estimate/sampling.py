"""Predict the memory and time of sampling, for online methods.

In addition to the weights, a process holds the keys and values of all tokens of the completions
that it samples at once, and for each completion a few rows with one entry per vocabulary item:
logits, their log-probabilities, and 64-bit noise.
"""

import dataclasses
import math

from finetune.planner.estimate.hardware import Machine
from finetune.planner.shapes.architecture import Architecture
from finetune.recipe import Recipe

OF_LOGITS = 4 + 4
"""Bytes per vocabulary item for logits and logits divided by the temperature."""
OF_NOISE = 8 + 8
"""Bytes per vocabulary item for noise: the output of Philox, and the values made from it."""
ROOM = 12
"""Tokens by which the tensors of keys and values grow."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Memory and time that sampling adds on one process."""

    rows: int
    """Completions sampled at once."""
    tokens: int
    """Maximum number of tokens in a prompt with its completion."""
    cache: float
    """Bytes of keys and values."""
    logits: float
    """Bytes of logits and noise."""
    seconds: float | None
    """Lower bound in seconds: reading the weights for each token of a batch, or multiplying."""

    @property
    def memory(self) -> float:
        """Peak bytes."""
        return self.cache + self.logits

    def summary(self) -> dict[str, float]:
        """Plain values for `plan.json`, with the same names as the measured values."""
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
    """Memory and time of sampling for a recipe; None if this process does not sample.

    Args:
        recipe: the recipe, which sets the number and length of completions.
        shape: shape of the model.
        processes: processes that share the completions.
        width: bytes per element of the compute data type.
        machine: machine for the prediction of time; None for memory only.
        tokens: length of the longest prompt with its completion; by default the maximum.
    """
    if recipe.sampled is None or recipe.samples_elsewhere:
        return None
    count, at_once, longest = recipe.sampled
    mine = math.ceil(count / processes)
    rows, tokens = min(mine, at_once), tokens or recipe.encoded_length + longest
    places = tokens - longest + (longest // (ROOM + 1) + 1) * (ROOM + 1)
    of_layer = 2 * shape.key * width * rows * places
    # Keys and values of one layer are copied one after the other when they grow.
    cache = of_layer * (shape.layers + 0.5)
    logits = rows * shape.vocab * (OF_LOGITS + OF_NOISE)
    seconds = None
    if machine is not None:
        reads = math.ceil(mine / rows) * longest * shape.parameters * width / machine.gpu.bandwidth
        products = 2 * shape.active_parameters * mine * longest / machine.gpu.flops
        seconds = max(reads, products)
    return Sampling(rows, tokens, cache, logits, seconds)
