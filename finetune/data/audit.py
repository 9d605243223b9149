"""Compute statistics of a data set, and detect likely mistakes."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.formats import advice
from finetune.data.read.remote import versions
from finetune.data.rows.store import Rows, digest, documents_of_rows
from finetune.data.tally import COUNTED, UNUSUAL, Tally
from finetune.errors import one_of
from finetune.recipe import Data, Recipe
from finetune.runs.addresses import is_address

EMPTY: dict[str, Any] = {"documents": 0}
"""Counts of an empty split."""
MOST_TIED = 0.01
"""Share of pairs with equal answers above which they are reported as a mistake."""
MOSTLY_LONGER = 0.65
"""Share of pairs with a longer chosen answer above which a model may mostly learn length."""
MEANT = "if this is intended, set data_checks=report"


@dataclass(frozen=True)
class Facts:
    """A few values per document."""

    trained: np.ndarray  # (documents,) int64: trained tokens
    ended: np.ndarray  # (documents,) bool: whether the last trained token ends a turn or a text
    digests: np.ndarray  # (documents,) uint64: hashes

    @classmethod
    def joined(cls, parts: Iterable["Facts"]) -> "Facts":
        """The facts of all documents, from those of parts of them in order."""
        parts = [cls(np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.uint64)), *parts]
        return cls(
            np.concatenate([part.trained for part in parts]),
            np.concatenate([part.ended for part in parts]),
            np.concatenate([part.digests for part in parts]),
        )


def count_rows(
    rows: Rows,
    facts: Facts,
    sources: list[tuple[Data, Tally, np.ndarray]],
    recipe: Recipe,
    files: list[str],
) -> dict[str, Any]:
    """Counts of a split: samples as read, rows as prepared, and each source's share.

    Args:
        rows: Rows of the split; a row that is repeated occurs as often.
        facts: Facts of all documents.
        sources: Data sections with their tallies and row numbers.
        recipe: Recipe of the run.
        files: File names, by the file numbers in the documents' origins.
    """
    lengths = rows.documents.lengths[rows.members]
    tallies = [tally for _, tally, _ in sources]
    tokens = int(lengths.sum())
    different, each = np.unique(rows.members), recipe.documents_per_row
    shares = [(data, tally, documents_of_rows(numbers, each)) for data, tally, numbers in sources]
    roles = sum((tally.roles for tally in tallies), Counter[str]())
    columns = sum((tally.columns for tally in tallies), Counter[str]())
    return {
        **{name: sum(tally.counts[name] for tally in tallies) for name in COUNTED},
        "first": _first_unended(rows, facts, files)
        | {n: tally.first[n] for tally in reversed(tallies) for n in tally.first},
        "rows": len(rows),
        "documents": len(rows.members),
        "tokens": tokens,
        "trained_tokens": int(facts.trained[rows.members].sum()),
        "unended": int(np.count_nonzero(~facts.ended[rows.members])),
        "duplicates": (len(different) - len(np.unique(facts.digests[different]))) // each,
        "documents_per_row": each,
        "longer_chosen": _longer_chosen(rows, facts, recipe) if recipe.takes == "pairs" else None,
        "wanted": _wanted(rows),
        "scored": recipe.head.scored,
        "labels": recipe.label_counts(rows),
        "same_label": recipe.takes == "labelled" and _has_one_label(rows),
        **_images(rows),
        "longest": int(lengths.max(initial=0)),
        "longest_sample": max((tally.longest_sample for tally in tallies), default=0),
        "mean_length": float(lengths.mean()) if len(lengths) else 0.0,
        "filled": tokens / (len(rows) * recipe.row_length) if rows.packed and len(rows) else None,
        "roles": dict(sorted(roles.items())),
        "columns_unread": dict(columns.most_common()),
        "sha256": digest(rows),
        "by_source": [
            {
                "source": data.source,
                "revision": versions(data.source) if is_address(data.source) else data.revision,
                "format": data.format,
                "samples": tally.counts["samples"],
                "rows": len(members) // each,
                "tokens": int(rows.documents.lengths[members].sum()),
                "trained_tokens": int(facts.trained[members].sum()),
                "truncated": tally.counts["truncated"],
                "eaten": tally.counts["eaten"],
                "unended": int(np.count_nonzero(~facts.ended[members])),
                "bad": tally.counts["bad"],
                "columns_unread": dict(tally.columns.most_common()),
            }
            for data, tally, members in shares
        ],
    }


MAXIMA = ("longest", "longest_sample", "most_image_tokens")
WEIGHED = {"longer_chosen": "documents", "filled": "rows", "mean_length": "documents"}
"""Means in the counts of a split, with what they are means over."""


def merged(first: dict[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    """Counts of two parts of a split as those of both, in their order."""
    if first is None:
        return then
    both = dict[str, Any]()
    for name, value in then.items():
        known = first[name]
        if name == "by_source":
            both[name] = [merged(*pair) for pair in zip(known, value, strict=True)]
        elif name == "sha256":
            both[name] = hashlib.sha256((known + value).encode()).hexdigest()
        elif name in WEIGHED and known is not None and value is not None:
            of = [counts[WEIGHED[name]] for counts in (first, then)]
            both[name] = (known * of[0] + value * of[1]) / max(1, sum(of))
        elif name == "first":
            both[name] = value | known
        elif isinstance(value, dict) and name != "revision":
            both[name] = dict(Counter[str](known) + Counter[str](value))
        elif isinstance(value, bool):
            both[name] = known and value
        elif name in ("documents_per_row", "revision") or not isinstance(value, int):
            both[name] = known
        else:
            both[name] = max(known, value) if name in MAXIMA else known + value
    return both


def _longer_chosen(rows: Rows, facts: Facts, recipe: Recipe) -> float:
    """Share of pairs whose chosen answer has more trained tokens than the rejected one.

    If only the last token is scored, the complete sequences are compared.
    """
    tokens = rows.documents.lengths if recipe.head.scored else facts.trained
    lengths = tokens[rows.members].reshape(-1, 2)
    return float((lengths[:, 0] > lengths[:, 1]).mean()) if len(lengths) else 0.0


def _images(rows: Rows) -> dict[str, int]:
    """Numbers of images and of their tokens; empty if no row has an image."""
    images = rows.documents.images
    if images is None:
        return {}
    kept = images.places[np.isin(images.places[:, 0], rows.members)]
    sizes = kept[:, 2] - kept[:, 1]
    largest = int(sizes.max(initial=0))
    return {"images": len(kept), "image_tokens": int(sizes.sum()), "most_image_tokens": largest}


def _wanted(rows: Rows) -> int | None:
    """Number of answers that are labelled as wanted; None for rows without this label."""
    wanted = rows.documents.columns.get("wanted")
    return None if wanted is None else int(np.count_nonzero(wanted[rows.members]))


def _has_one_label(rows: Rows) -> bool:
    """Whether there are several documents and all have the same label."""
    here = [values[rows.members] for values in rows.documents.columns.values()]
    return len(rows.members) > 1 and all(bool((each == each[0]).all()) for each in here)


def _first_unended(rows: Rows, facts: Facts, files: list[str]) -> dict[str, str]:
    """The file and row of the first document whose end is not trained, if there is one."""
    members = np.sort(rows.members)
    unended = members[~facts.ended[members]]
    if not len(unended):
        return {}
    file, number = rows.documents.origins[int(unended[0])]
    return {"unended": f"{files[int(file)]} row {int(number)}"}


def mistakes(counts: dict[str, Any]) -> Iterator[str]:
    """Yield likely mistakes in the training rows, as error messages."""
    if counts.get("tied", 0) > MOST_TIED * counts["samples"]:
        yield (
            f"data: the two answers of {counts['tied']} of {counts['samples']} pairs are the same "
            f"tokens, the first: {counts['first'].get('tied')}; raise batch.max_length if they are "
            f"truncated, or check for copied answers; {MEANT}"
        )
    if counts["documents"] and counts.get("wanted") in (0, counts["documents"]):
        kind = "wanted" if counts["wanted"] else "unwanted"
        yield (
            f"data: each of the {counts['documents']:,} answers is labelled as {kind}, so there is "
            f"nothing to compare them with; check the column of labels; {MEANT}"
        )
    if counts.get("same_label"):
        yield (
            f"data: all {counts['documents']} rows have the same label{_named_labels(counts)}, so "
            f"nothing can be learned from it; look at the column 'label', or shuffle a file that "
            f"is sorted by label before data.first cuts it; {MEANT}"
        )
    if counts["documents"] and counts["unended"] == counts["documents"]:
        cut = f" ({counts['truncated']} rows are truncated)" if counts["truncated"] else ""
        yield (
            f"data: none of the {counts['documents']} rows is trained to end{cut}, so the model "
            f"would never stop; raise batch.max_length, or set batch.overlong=drop; {MEANT}"
        )
    for each in counts["by_source"]:
        if 0 < each["unended"] == each["rows"] and counts["unended"] < counts["documents"]:
            yield (
                f"{each['source']}: none of its {each['rows']} rows is trained to end "
                f"({each['truncated']} are truncated); raise batch.max_length, or set "
                f"batch.overlong=drop; {MEANT}"
            )
        if each["bad"] > each["samples"] / 2:
            yield (
                f"{each['source']}: {each['bad']} of its {each['samples']} rows are bad and were "
                f"dropped, the first: {counts['first'].get('bad')}; {MEANT}"
            )
        if each["eaten"] and each["eaten"] == each["truncated"] >= each["samples"] / 10:
            yield (
                f"{each['source']}: truncation removed the complete answer of all "
                f"{each['truncated']} truncated rows, of {each['samples']} rows; raise "
                f"batch.max_length, or set batch.overlong=drop; {MEANT}"
            )


def beyond_context(
    recipe: Recipe, splits: Iterable[Rows], context: int, learned: bool
) -> str | None:
    """An error message if rows are longer than the model's context; None otherwise.

    Args:
        recipe: Recipe, whose completions need a part of the context.
        splits: Rows to train on and to evaluate on.
        context: Maximum tokens of a row, from the model's configuration.
        learned: Whether the model has learned positions, and none beyond the context.
    """
    lengths = np.concatenate([rows.documents.lengths[rows.members] for rows in splits])
    answer = recipe.completion_length
    longer, longest = np.count_nonzero(lengths > context - answer), lengths.max(initial=0)
    if not longer:
        return None
    meant = "it has no positions beyond that" if learned else MEANT
    less = f" minus {answer:,} for the completion" if answer else ""
    return (
        f"data: {longer:,} of {len(lengths):,} rows are longer than the model's context of "
        f"{context:,} tokens{less}, the longest {longest:,}; set batch.max_length={context}, and "
        f"batch.overlong to {one_of(recipe.fits_rows_by)}; {meant}"
    )


def identity(counts: dict[str, Any]) -> dict[str, Any]:
    """Values that identify the rows of a run, by split: see `prepare.Prepared.counts`."""
    kept = ("documents", "tokens", "sha256")
    return {split: {name: counts[split][name] for name in kept} for split in ("train", "eval")}


def describe(counts: dict[str, Any]) -> list[str]:
    """Lines of text about a split: its counts, then anything unusual."""
    if not counts["documents"]:
        return ["no rows"]
    each = counts.get("documents_per_row", 1)
    unit = f"{counts['documents'] // each:,} {'rows' if each == 1 else 'pairs'}"
    if counts["filled"] is not None:
        unit += f" in {counts['rows']:,} packs, {counts['filled']:.1%} filled"
    trained = f"{counts['trained_tokens'] / counts['tokens']:.1%} trained"
    if counts.get("scored"):
        trained = "scored at the last token of each"
    line = f"{unit}; {counts['tokens']:,} tokens, {trained}; longest {counts['longest']}"
    first = {name: f" (first: {place})" for name, place in counts.get("first", {}).items()}
    unusual = [
        f"{counts[name]:,} {words}{first.get(name, '')}"
        for name, words in UNUSUAL.items()
        if counts.get(name)
    ]
    lines = [line, ", ".join(unusual)] if unusual else [line]
    if counts.get("images"):
        most = f"at most {counts['most_image_tokens']:,} in one"
        lines.insert(1, f"{counts['images']:,} images; {counts['image_tokens']:,} tokens, {most}")
    lines += _of_pairs(counts)
    lines += [f"labels{_named_labels(counts)}"] if counts.get("labels") else []
    lines += _unread(counts)
    lines += [DATED] if counts.get("fixed_date") else []
    for name, words in FILES.items():
        files = counts.get(name) or ()
        lines += [f"{words}: {_some(files, 3)}"] if files else []
    return lines


def _some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _named_labels(counts: dict[str, Any]) -> str:
    """Label frequencies, after a colon; empty if the labels have no names."""
    found = [f"{_shown(name)} {count:,}" for name, count in counts["labels"].items()]
    return f": {_some(found, 12)}" if found else ""


def _of_pairs(counts: dict[str, Any]) -> Iterator[str]:
    wanted = counts.get("wanted")
    if wanted is not None:
        yield f"{wanted:,} wanted and {counts['documents'] - wanted:,} unwanted answers"
    share = counts.get("longer_chosen")
    if share is not None:
        more = "; the model may mostly learn length" if share > MOSTLY_LONGER else ""
        yield f"the chosen answer is the longer one in {share:.0%} of the pairs{more}"


def _unread(counts: dict[str, Any]) -> Iterator[str]:
    """Yield the columns that no format reads, and the format that would train an answer in them."""
    columns = counts.get("columns_unread") or {}
    if columns:
        named = [f"{_shown(n)} ({rows:,} row{'s' * (rows != 1)})" for n, rows in columns.items()]
        yield f"columns that the format does not read: {_some(named, 12)}"
    for each in counts.get("by_source", ()):
        instead = advice("text", dict.fromkeys(["text", *each.get("columns_unread", ())], "x"))
        if each["format"] == "text" and '"text"' in instead:
            yield f"{each['source']}: format 'text' trains only the column 'text'{instead}"


def _shown(name: str) -> str:
    """A name in printable form, at most 60 characters of it."""
    name = name if len(name) <= 60 else f"{name[:57]}..."
    return name if name.strip() and name.isprintable() else ascii(name)


DATED = (
    "the chat template writes the current date: all rows are rendered with 26 July 2024, so that "
    "the data is the same every day; set the date with model.chat_template_kwargs if the template "
    "has a variable for it (date_string)"
)
"""Shown for a template with `strftime_now`."""

FILES = {
    "unread": "not read, unsupported file type",
    "outside": "not read, not in a split by their names",
    "folders": "not read, folders that the pattern matches (** reads their files)",
    "without_rows": "without rows",
}
"""Lists of files that are shown if they are not empty."""
