"""Required bounds on measures, for scripts and CI: `exact>=0.8,json>=0.99,forgetting<=0.02`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.errors import did_you_mean, refuse
from finetune.evaluation.measures import Measure, rows_needed

BOUND = re.compile(
    r"\s*([\w@/.-]+?)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*"
)


@dataclass(frozen=True)
class Bound:
    """A required bound on a measure."""

    name: str
    sign: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value:g}"


@dataclass(frozen=True)
class Verdict:
    """The result of checking a bound."""

    bound: Bound
    passed: bool
    said: str


def bounds(text: str) -> list[Bound]:
    """Parse bounds separated by commas.

    Raises:
        FinetuneError: a bound is not a name, `>=` or `<=`, and a number.
    """
    found, problems = list[Bound](), list[str]()
    for part in text.split(","):
        if match := BOUND.fullmatch(part):
            value = float(match[3]) / (100 if match[4] else 1)
            found.append(Bound(match[1], match[2], value))
        else:
            problems.append(
                f"--require: got '{part.strip()}', expected a measure with a bound, such as "
                "exact>=0.8 or forgetting<=0.02"
            )
    refuse(problems)
    return found


def judge(required: Sequence[Bound], measures: Mapping[str, Measure]) -> list[Verdict]:
    """Check that the complete interval of each measure is within its bound, not only its mean."""
    check(required, list(measures))
    return [_judge(each, measures[each.name]) for each in required]


def _judge(bound: Bound, measure: Measure) -> Verdict:
    interval = measure.interval()
    if interval is None:
        return Verdict(bound, False, f"{bound}: {measure.total:.4g} of one row has no interval")
    low, high = interval
    passed = low >= bound.value if bound.sign == ">=" else high <= bound.value
    summary = f"{measure.total:.4g}, 95 % interval {low:.4g} to {high:.4g}, {measure.rows:,} rows"
    within = measure.total >= bound.value if bound.sign == ">=" else measure.total <= bound.value
    if not passed and within:
        summary += f"; the bound is inside the interval: {_advice(bound, measure)}"
    return Verdict(bound, passed, f"{bound}: {summary}")


def _advice(bound: Bound, measure: Measure) -> str:
    if measure.binary and measure.total == 1.0 and bound.sign == ">=" and bound.value < 1:
        return f"at least {rows_needed(bound.value):,} rows, all correct, are needed to show it"
    return "more rows would narrow the interval"


def check(required: Sequence[Bound], known: Sequence[str]) -> None:
    """Reject bounds on measures that will not be measured.

    Raises:
        FinetuneError: there are such bounds; the message lists all of them.
    """
    problems = [
        f"--require {each}: '{each.name}' is not measured{did_you_mean(each.name, known)}; "
        f"measured are {', '.join(known)}"
        for each in required
        if each.name not in known
    ]
    refuse(problems)
