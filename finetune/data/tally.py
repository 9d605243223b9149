"""Count what happened to the rows of a source, with the words for each count."""

from collections import Counter
from dataclasses import dataclass, field

UNUSUAL = {
    "bad": "bad rows dropped",
    "also_trained": "also in the training data",
    "passed_over": "skipped by their format",
    "empty": "with only empty answers",  # the model would learn to stop at once
    "empty_turns": "with an empty answer among others",
    "untrained": "without a trained token",
    "dropped": "dropped because of their length",
    "short": "shorter than batch.min_length, dropped",
    "repeated": "dropped as duplicates",
    "left_out": "left out by the weights of the mixture",
    "truncated": "truncated",
    "eaten": "without an answer after truncation",  # in one of their sequences
    "tied": "pairs with two equal answers, dropped",  # equal tokens, maybe only after truncation
    "split": "split",
    "unended": "whose end is not trained",
    "duplicates": "duplicates",
    "history_thoughts": "with thoughts in earlier turns that the template leaves out",
    "tool_details": "with descriptions or values of tool parameters that the template leaves out",
    "unserved": "with an answer that does not begin with the full generation prompt",
    "call_ids": "with tool call ids that the template refuses, replaced",
    "markup_asked": "with special tokens of the template in the text of their prompts",
    "markup_said": "with special tokens of the template in the text of their answers",
    "no_bos": "without the BOS or prefix that the tokenizer adds",
    "two_bos": "that begin with two BOS",
    "images_rotated": "with an image that its EXIF data turns",
    "images_transparent": "with a transparent image, which becomes white there",
    "unasked": "with an empty prompt and no BOS: the first token of the answer is not trained",
}
"""Counts that are shown if they are not zero, with the words behind the number."""
OF_ROWS = ("also_trained", "left_out", "unended", "duplicates")
"""Counts of prepared rows, which are not in a tally."""
COUNTED = ("samples", "overlong", *(name for name in UNUSUAL if name not in OF_ROWS))
"""Counts of a tally, which are summed over all sources."""


@dataclass
class Tally:
    """Counts of what happened to the samples of a source."""

    counts: Counter[str] = field(default_factory=Counter)
    """Samples by the names in `COUNTED`: `samples` counts the rows that were read, and `overlong`
    samples longer than the maximum length, however they were handled."""
    longest_sample: int = 0
    """Tokens of the longest sample, before truncation."""
    longest_place: str = ""
    roles: Counter[str] = field(default_factory=Counter)
    """Messages by role and their images; prompts, completions, texts count under these names."""
    columns: Counter[str] = field(default_factory=Counter)
    """Rows with a value in a column that the format does not read, by column; and messages with
    a key that neither the format nor the template reads."""
    first: dict[str, str] = field(default_factory=dict)
    """File and row of the first sample of each nonzero count."""

    def note(self, name: str, place: str, times: int = 1) -> None:
        """Add to the count of a name; `place` is the sample's file and row."""
        if times:
            self.counts[name] += times
            self.first.setdefault(name, place)

    def add(self, other: "Tally") -> None:
        self.counts.update(other.counts)
        self.first = other.first | self.first
        if other.longest_sample > self.longest_sample:
            self.longest_sample, self.longest_place = other.longest_sample, other.longest_place
        self.roles.update(other.roles)
        self.columns.update(other.columns)
