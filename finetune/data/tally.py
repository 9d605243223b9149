"""Count what happened to the rows of a source."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Tally:
    """Counts of what happened to the samples of a source."""

    samples: int = 0
    """Rows that were read."""
    passed_over: int = 0
    """Samples that the format skips."""
    untrained: int = 0
    """Rows dropped because they have no trained token."""
    dropped: int = 0
    """Samples dropped because they are too long."""
    truncated: int = 0
    """Truncated samples."""
    eaten: int = 0
    """Truncated samples with a sequence that lost all of its trained tokens."""
    tied: int = 0
    """Pairs dropped because both answers are the same tokens, possibly only after truncation."""
    split: int = 0
    """Samples split into several rows."""
    empty: int = 0
    """Samples with a sequence of only empty answers: the model would learn to stop at once."""
    bad: int = 0
    """Rows dropped because they could not be read or rendered."""
    empty_turns: int = 0
    """Samples with both empty and non-empty answers."""
    history_thoughts: int = 0
    """Samples with thoughts in earlier turns, which the template leaves out."""
    tool_details: int = 0
    """Samples with tools of whose parameters the template leaves out descriptions or values."""
    unserved: int = 0
    """Samples with an answer that does not begin with the full generation prompt of serving."""
    call_ids: int = 0
    """Samples whose tool call ids the template rejects, so they were replaced."""
    markup_asked: int = 0
    """Samples with special tokens, or a turn's header, in the text of a prompt."""
    markup_said: int = 0
    """Samples with special tokens, or a turn's header, in the text of an answer."""
    no_bos: int = 0
    """Samples without the BOS that the tokenizer adds to a text."""
    two_bos: int = 0
    """Samples that begin with two BOS."""
    unasked: int = 0
    """Answers to an empty prompt, whose first token nothing predicts."""
    overlong: int = 0
    """Samples longer than the maximum length, however they were handled."""
    longest_sample: int = 0
    """Tokens of the longest sample, before truncation."""
    longest_place: str = ""
    roles: Counter[str] = field(default_factory=Counter)
    """Messages by role; prompts, completions and texts count under these names."""
    columns: Counter[str] = field(default_factory=Counter)
    """Rows with a value in a column that the format does not read, by column; and messages with
    a key that neither the format nor the template reads."""
    first: dict[str, str] = field(default_factory=dict)
    """File and row of the first sample of each nonzero count."""

    def note(self, name: str, place: str, times: int = 1) -> None:
        """Add to the count of a name; `place` is the sample's file and row."""
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


COUNTED = [
    each.name for each in fields(Tally) if each.default == 0 and each.name != "longest_sample"
]
"""Fields of a tally that are summed over all sources."""
