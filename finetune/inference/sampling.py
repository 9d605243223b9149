"""Sample completions of online methods.

The noise of a row is named by its prompt and its number among the completions of the prompt, and
the key of a batch is (seed, step). Therefore a completion does not depend on its batch or on the
number of processes, except for rounding of logits.
"""

import dataclasses
from collections.abc import Sequence

from torch import nn

from finetune.data.images.inputs import ImageInputs
from finetune.inference.decoder import Row, decode


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled completion."""

    ids: list[int]
    """Token ids, including the stop token."""
    ended: bool
    """Whether it ended with a stop token rather than at the limit."""
    entropy: float
    """Entropy of the sampling distribution in nats, summed over the tokens; 0 if greedy."""
    logps: tuple[float, ...] = ()
    """Log-probability of each token, if another program sampled it, or from fewer tokens."""


def sample(
    model: nn.Module,
    rows: Sequence[Row],
    pad: int,
    at_once: int,
    seed: int,
    step: int,
    inputs: ImageInputs | None = None,
) -> list[Completion]:
    """One completion per row, in order; see `decode`."""
    decode(model, rows, pad, at_once, (seed, step), inputs=inputs)
    return [Completion(row.ids, row.stopped, row.entropy, tuple(row.logps)) for row in rows]
