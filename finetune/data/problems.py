"""Collect problems of the data to report them all at once."""

import re
from collections.abc import Iterable, Iterator

from finetune.data.tally import Tally
from finetune.errors import FinetuneError, one_of
from finetune.recipe import Data, Recipe

MOST_PROBLEMS = 10
MOST_PLACES = 1000
SKIPPED = {
    "hh": "a turn is empty, or more than the last one differs",
    **dict.fromkeys(("ranked", "ranked_best", "ranked_all"), "all answers are ranked equally"),
    "self_instruct": "a task has no instances",
}
"""Why formats skip a row."""


class Problems:
    """Problems found in the data; reading continues until there are `enough`.

    Problems that differ only in quoted texts and numbers are reported once, with a row count.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[str, str]]] = {}  # kind -> place and problem
        self.places = 0

    @property
    def enough(self) -> bool:
        return len(self.found) >= MOST_PROBLEMS or self.places >= MOST_PLACES

    def add(self, place: str, problem: str) -> None:
        kind = _kind(problem) if place else problem
        if len(self.found) < MOST_PROBLEMS or kind in self.found:
            self.found.setdefault(kind, []).append((place, problem))
        self.places += bool(place)

    def add_all(self, problems: Iterable[str]) -> None:
        """Add problems that already name their location."""
        for problem in problems:
            self.add("", problem)

    def raise_any(self) -> None:
        """Raise FinetuneError if there are problems."""
        if not self.found:
            return
        lines = []
        for told_of in self.found.values():
            place, problem = told_of[0]
            others = len(told_of) - 1
            more = f" (and {others} more row{'s' * (others > 1)})" if others else ""
            lines.append(f"{place}{more}: {problem}" if place else problem)
        if self.enough:
            lines.append("reading stopped here; there may be more")
        raise FinetuneError(*lines)


def _kind(problem: str) -> str:
    """A problem without its quoted texts and numbers, to group equal ones."""
    quoted = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
    return re.sub(r"\d+", "#", re.sub(quoted, "''", problem))


def check_source(data: Data, tally: Tally, rows: int, recipe: Recipe) -> Iterator[str]:
    """Yield problems of a complete source, of which `rows` rows are left to train on."""
    source, longest, batch = data.source, tally.longest_sample, recipe.batch
    counts = tally.counts
    answer = recipe.completion_length
    less = f" minus {answer} for the completion" if answer else ""
    if not counts["samples"] and not rows:
        part = data.split[len(data.split_name) :]
        yield f"{source}: {f'split {data.split}' if part else 'it'} has no rows"
    elif batch.overlong == "error" and counts["overlong"]:
        yield (
            f"{source}: {counts['overlong']} of {counts['samples']} rows are longer than "
            f"batch.max_length={batch.max_length} tokens{less}, the longest {longest} "
            f"({tally.longest_place}); set batch.max_length={longest + answer}, or batch.overlong "
            f"to {one_of(recipe.fits_rows_by)}"
        )
    elif not rows:
        after = {
            "eaten": f", {counts['eaten']} of them because truncation removed their answer",
            "passed_over": f": {SKIPPED[data.format]}" if data.format in SKIPPED else "",
            "bad": f", {counts['bad']} dropped as bad rows, the first: {tally.first.get('bad')}",
        }
        eaten, why, bad = (words if counts[name] else "" for name, words in after.items())
        yield (
            f"{source}: none of its {counts['samples']} rows is left to train on "
            f"({counts['untrained']} without a trained token{eaten}, {counts['dropped']} longer "
            f"than batch.max_length={batch.max_length}, {counts['passed_over']} skipped by format "
            f"'{data.format}'{why}{bad})"
        )
