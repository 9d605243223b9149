"""Tables of a run's data, from the counts of each split, without counts that are zero."""

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.data.tally import UNUSUAL
from finetune.reports.tables import Table, cell_of, is_plain, tables, words

NAMES: Mapping[str, str] = {
    **{name: f"samples {said}" for name, said in UNUSUAL.items()},
    "bad": UNUSUAL["bad"],
    "tied": UNUSUAL["tied"],
    "duplicates": "duplicates",
    "split": "samples split into several rows",
    "overlong": "samples longer than the maximum length",
    "unended": "sequences whose end is not trained",
    "documents": "sequences",
    "documents_per_row": "sequences per row",
    "longest": "longest sequence, tokens",
    "longest_sample": "longest sample before truncation, tokens",
    "mean_length": "mean sequence, tokens",
    "filled": "share of packs filled with tokens",
    "longer_chosen": "share of pairs with a longer chosen answer",
    "wanted": "answers labelled as wanted",
    "fixed_date": "rendered with a fixed date",
    "first": "first of them",
    "columns_unread": "columns that are not read",
}
"""Names of counts for readers, where they differ."""
HASH = "sha256"


def data_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """The counts of all splits side by side, then the sources, roles and places of each split."""
    splits = {name: part for name, part in record.items() if isinstance(part, Mapping)}
    names = dict.fromkeys(
        name
        for part in splits.values()
        for name in part
        if name != HASH and is_plain(part[name]) and part[name]
    )
    rows = [
        [_name(name), *(cell_of(name, part.get(name)) for part in splits.values())]
        for name in names
    ]
    if rows:
        yield Table(rows, ("", *map(words, splits)))
    hashes = [(words(split), part[HASH]) for split, part in splits.items() if HASH in part]
    if hashes:
        yield Table(hashes, heading=HASH)
    for split, part in splits.items():
        for name, value in part.items():
            if name not in (*names, HASH) and (rest := _without_zeros(value)):
                named = {_name(k): v for k, v in rest.items()} if name == "first" else rest
                yield from tables(named, f"{words(split)}, {_name(name)}")
    others = {name: value for name, value in record.items() if name not in splits}
    if others:
        yield from tables(others)


def _name(name: str) -> str:
    return NAMES.get(name, words(name))


def _without_zeros(value: Any) -> Any:
    """A value of a record without counts that are zero, and without empty parts."""
    if isinstance(value, Mapping):
        return {name: rest for name, each in value.items() if (rest := _without_zeros(each))}
    return [_without_zeros(each) for each in value] if isinstance(value, list) else value
