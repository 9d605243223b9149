"""What a method makes of a sample: one or more sequences that stay together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.data.chat.render import Row


@dataclass(frozen=True)
class Example:
    """The sequences of one row of data: one of a text, two of a pair of answers.

    No micro-batch, rank or pack separates them.
    """

    sequences: tuple[Row, ...]
    """As many of every sample as the method's `documents_per_row`."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """What is known of the row beside its tokens, by the names in the method's `columns`."""
    scored: bool = False
    """Whether what is learned is read at the last token of each sequence."""
    beside: str | None = None
    """Of a prompt, whose answer is made while training: what a reward is given, as JSON."""
