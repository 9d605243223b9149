"""The encoded form of a sample: one or more sequences that stay together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.data.chat.tokens import Row


@dataclass(frozen=True)
class Example:
    """The sequences of one row of data: one for a text, two for a pair of answers.

    They are always in the same packed row, micro-batch and rank.
    """

    sequences: tuple[Row, ...]
    """The sequences; each sample has `documents_per_row` of them, as the method defines."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of the row other than its tokens, by the names in the method's `columns`."""
    scored: bool = False
    """Whether the model is trained on a score at the last token of each sequence."""
    beside: str | None = None
    """For a prompt that is answered during training: the reward's input, as JSON."""
