"""Counts of what became of the rows of a source."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What became of the samples of a source."""

    samples: int = 0
    """Rows that were read."""
    passed_over: int = 0
    """Samples that the format leaves out."""
    untrained: int = 0
    """Rows left out because the model would not be trained to say any of their tokens."""
    dropped: int = 0
    """Samples left out for their length."""
    truncated: int = 0
    """Samples cut to length."""
    eaten: int = 0
    """Those of them that lost every token that was to be trained."""
    tied: int = 0
    """Pairs left out because both answers are the same tokens, perhaps once they were cut."""
    split: int = 0
    """Samples cut into several rows."""
    empty: int = 0
    """Samples in which nothing is said to train on: the model would learn to end at once."""
    bad: int = 0
    """Rows left out because they could not be read or rendered."""
    empty_turns: int = 0
    """Samples with an empty answer among others."""
    history_thoughts: int = 0
    """Samples with thoughts of earlier turns, which the template leaves out."""
    unserved: int = 0
    """Samples whose last answer begins before the end of the prompt that serving gives."""
    call_ids: int = 0
    """Samples whose ids of tool calls the template refuses, so that they got others."""
    markup_asked: int = 0
    """Samples with special tokens, or a turn's header, in the texts of their prompts."""
    markup_said: int = 0
    """Samples with special tokens, or a turn's header, in the texts of their answers."""
    no_bos: int = 0
    """Samples without the BOS that the tokenizer begins a text with."""
    two_bos: int = 0
    """Samples that begin with two BOS."""
    overlong: int = 0
    """Samples longer than allowed, whatever became of them."""
    longest_sample: int = 0
    """Tokens of the longest sample, before it was cut."""
    longest_place: str = ""
    roles: Counter[str] = field(default_factory=Counter)
    """Messages by role; prompts, completions and texts by these names."""
    columns: Counter[str] = field(default_factory=Counter)
    """Rows with a value in a column that the format does not read, by its name; and messages with
    a key that neither the format nor the template reads."""
    first: dict[str, str] = field(default_factory=dict)
    """The file and row of the first of each of these numbers that is not zero."""

    def note(self, name: str, place: str, times: int = 1) -> None:
        """Count what became of the sample of a place."""
        if times:
            setattr(self, name, getattr(self, name) + times)
            self.first.setdefault(name, place)

    def add(self, other: "Tally") -> None:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = other.first | self.first
        if other.longest_sample > self.longest_sample:
            self.longest_sample, self.longest_place = other.longest_sample, other.longest_place
        self.roles.update(other.roles)
        self.columns.update(other.columns)


COUNTED = (
    "samples", "passed_over", "untrained", "dropped", "truncated", "eaten", "tied", "split",
    "overlong", "empty", "bad", "empty_turns", "history_thoughts", "unserved", "call_ids",
    "markup_asked", "markup_said", "no_bos", "two_bos",
)  # fmt: skip
"""The numbers of a tally that are counted over all sources."""
