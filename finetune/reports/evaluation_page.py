"""Write the page of an evaluation: measures before and after, and answers side by side."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from finetune.reports.tables import aligned, rendered, with_pictures

ORDER = ("got worse", "got better", "both wrong", "wrong", "both right", "right", "")
SHOWN = 40
"""Maximum rows of each kind on the page; the file has all of them."""
LONGEST = 4_000
"""Maximum characters of a text on the page."""
WORDS = re.compile(r"\w+|\s+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class Line:
    """A measure, formatted as text."""

    name: str
    before: str
    after: str
    difference: str
    interval: str
    look: str
    """`good` or `bad` if the interval of the difference excludes zero, otherwise empty."""
    about: str
    """Intervals of both values, for a tooltip."""


def page(results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """The evaluation as a self-contained HTML page.

    Args:
        results: contents of `results.json`.
        samples: rows of `samples.jsonl`.
    """
    compared = results["against"] is not None
    groups = [
        (kind, len(rows), [_sample(row, compared) for row in rows[:SHOWN]])
        for kind in ORDER
        if (rows := [row for row in samples if row["change"] == kind])
    ]
    tables = [(name, _confusion(each)) for name, each in results["measures"].items()]
    return rendered(
        "evaluation.html.jinja",
        title=title(results),
        subtitle=rows_line(results),
        compared=compared,
        lines=lines(results),
        gate=results["gate"],
        notes=[*results["notes"], *_also_trained(results)],
        confusion=[(name, table) for name, table in tables if table],
        fields=_fields(results),
        groups=groups,
        primary=results["primary"],
        settings=results["settings"],
        versions=results["versions"],
    )


def title(results: Mapping[str, Any]) -> str:
    """Name of the model, and of the model that it is compared against."""
    subject, against = results["subject"]["name"], results["against"]
    if against is None:
        return subject
    other = "its base" if against["kind"] == "base" else against["name"]
    return f"{subject} against {other}"


def rows_line(results: Mapping[str, Any]) -> str:
    """Number of rows answered and scored, as text."""
    rows = results["rows"]
    count = f"{rows['answered']:,} of {rows['of']:,} rows answered" if rows["answered"] else ""
    scored = f"loss of {rows['scored']:,} rows" if rows["scored"] else ""
    return ", ".join(filter(None, (count, scored)))


def lines(results: Mapping[str, Any]) -> list[Line]:
    """Every measure as text, and limits and speed of each model's answers."""
    found = [_line(name, each) for name, each in results["measures"].items()]
    sides = [results["against"], results["subject"]]
    if results["rows"]["answered"]:
        for name, key in (("cut by the limit", "cut"), ("tokens per second", "tokens_per_second")):
            before, after = ("" if s is None else f"{s[key]:,.0f}" for s in sides)
            found.append(Line(name, before, after, "", "", "", ""))
    return found


def _line(name: str, measured: Mapping[str, Any]) -> Line:
    unit, change = measured["unit"], measured["difference_interval"]
    interval = change or measured["after_interval"]
    look = ""
    if change and measured["better"] and (change[0] > 0 or change[1] < 0):
        look = "good" if (change[0] > 0) == (measured["better"] == "higher") else "bad"
    about = "; ".join(
        f"{side} {between(measured[f'{side}_interval'], unit)}"
        for side in ("before", "after")
        if measured[f"{side}_interval"]
    )
    return Line(
        name=name,
        before=shown(measured["before"], unit),
        after=shown(measured["after"], unit),
        difference=shown(measured["difference"], unit, signed=True),
        interval=between(interval, unit, signed=change is not None),
        look=look,
        about=about,
    )


def shown(value: float | None, unit: str, signed: bool = False) -> str:
    """A number formatted for its unit; shares are in percent."""
    if value is None:
        return ""
    sign = "+" if signed else ""
    match unit:
        case "share":
            return f"{value * 100:{sign}.1f}{'' if signed else '%'}"
        case "points" | "tokens":
            return f"{value:{sign}.1f}"
        case _:
            return f"{value:{sign}.4g}" if abs(value) < 1000 else f"{value:{sign},.0f}"


def between(interval: Sequence[float] | None, unit: str, signed: bool = False) -> str:
    """An interval as text; empty without one."""
    if interval is None:
        return ""
    low, high = (shown(each, unit, signed) for each in interval)
    return f"{low} to {high}"


def _also_trained(results: Mapping[str, Any]) -> list[str]:
    shared = results["rows"]["also_trained"]
    if shared is None or not shared["prompts"]:
        return []
    return [
        f"{shared['prompts']} rows have a question that was trained, {shared['rows']} of them with "
        f"the same answer (first: {shared['first']})"
    ]


def _confusion(measured: Mapping[str, Any]) -> dict[str, Any] | None:
    return (measured.get("after_detail") or {}).get("confusion")


def _fields(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Accuracy per field of JSON answers: (field, before, after)."""
    measured = results["measures"].get("json_fields")
    if measured is None:
        return []
    after, before = (
        (measured.get(f"{side}_detail") or {}).get("fields", {}) for side in ("after", "before")
    )
    return [
        (name, shown(before.get(name), "share"), shown(v, "share")) for name, v in after.items()
    ]


def _sample(row: Mapping[str, Any], compared: bool) -> dict[str, Any]:
    expected = row["expected"][:LONGEST]
    answers = [
        (side, marked(row[side][:LONGEST], expected), row[f"{side}_finish"] == "length")
        for side in (("before", "after") if compared else ("after",))
    ]
    return {
        "place": row["place"],
        "prompt": with_pictures(row["prompt"][:LONGEST], row.get("images")),
        "expected": expected,
        "answers": answers,
        "scores": [(name, units_of(each)) for name, each in row["scores"].items()],
    }


def units_of(scores: Mapping[str, float]) -> str:
    """Scores before and after, such as `0 -> 1`, or the only score."""
    ordered = [scores[side] for side in ("before", "after") if side in scores]
    return " -> ".join(f"{each:.3g}" for each in ordered)


def marked(answer: str, expected: str) -> Markup:
    """HTML of an answer with its differences from the expected answer as `<ins>` and `<del>`."""
    predicted, wanted = WORDS.findall(answer), WORDS.findall(expected)
    parts = list[str]()
    for what, a, b, c, d in difflib.SequenceMatcher(None, wanted, predicted, False).get_opcodes():
        lacking, added = escape("".join(wanted[a:b])), escape("".join(predicted[c:d]))
        if what == "equal":
            parts.append(str(added))
            continue
        if lacking:
            parts.append(f"<del>{lacking}</del>")
        if added:
            parts.append(f"<ins>{added}</ins>")
    return Markup("".join(parts))  # every part was escaped above


def terminal(results: Mapping[str, Any]) -> list[str]:
    """The table of measures as lines of text."""
    compared = results["against"] is not None
    heads = ("", "before", "after", "difference", "95% interval") if compared else (
        "", "value", "95% interval"
    )  # fmt: skip
    rows = [heads]
    for each in lines(results):
        full = (each.name, each.before, each.after, each.difference, each.interval)
        rows.append(full if compared else (each.name, each.after, each.interval))
    found = [f"{title(results)}: {rows_line(results)}", *aligned(rows)]
    found += [f"note       {each}" for each in (*results["notes"], *_also_trained(results))]
    return found
