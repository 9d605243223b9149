"""Sample completions, with noise that depends only on (seed, step, prompt, number, place).

Therefore a completion does not depend on its batch or on the number of processes, except for
rounding of logits.
"""

import dataclasses
from collections.abc import Sequence

import torch

from finetune.inference.decoder import Row, decode


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request for one completion."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    row: int
    """Index of the prompt, for the noise."""
    number: int
    """Index among the completions of the prompt."""


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
    """Log-probability of each token, if another program sampled it."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples completions from a model."""

    model: torch.nn.Module
    stops: tuple[int, ...]
    limit: int
    """Maximum tokens of a completion."""
    temperature: float
    """0 selects the most likely token."""
    pad_id: int
    batch_rows: int = 64
    """Maximum number of completions in a batch."""

    def __call__(self, wanted: Sequence[Wanted], seed: int, step: int) -> list[Completion]:
        """One completion per request, in order."""
        rows = [
            Row(each.prompt, self.limit, self.stops, self.temperature, name=(each.row, each.number))
            for each in wanted
        ]
        decode(self.model, rows, self.pad_id, self.batch_rows, (seed, step))
        return [Completion(row.ids, row.stopped, row.entropy) for row in rows]
