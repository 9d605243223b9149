"""Turn JSON records of any structure into readable tables, and open the templates of pages."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

from finetune.data.images.image_file import PLACE
from finetune.runs import units
from finetune.runs.summary import is_exact

Cell = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns, or pairs of name and value without column names."""

    rows: Sequence[Sequence[Cell]]
    columns: Sequence[str] = ()
    heading: str = ""

    def numeric(self, column: int) -> bool:
        """Whether a column is right-aligned: every non-empty cell starts with a digit, apart from
        its sign.
        """
        cells = [cell(row[column]) for row in self.rows if row[column] not in (None, "", "-")]
        return bool(cells) and all(text.lstrip("+-")[:1].isdigit() for text in cells)


def tables(record: Any, heading: str = "") -> Iterator[Table]:
    """A JSON record as tables: one of its plain values, then one for each nested part.

    Parts with the same keys, such as `train` and `eval`, become columns of one table.
    """
    if isinstance(record, list):
        yield from _listed(record, heading)
        return
    plain = _plain(record)
    if plain:
        yield Table([(words(k), cell_of(k, v)) for k, v in plain.items()], heading=heading)
    parts = {name: value for name, value in record.items() if name not in plain}
    alike = _alike(parts)
    if alike:
        first = next(iter(alike.values()))
        rows = [[words(k), *(cell_of(k, part[k]) for part in alike.values())] for k in first]
        yield Table(rows, ["", *map(words, alike)], heading)
    for name, value in parts.items():
        rest = value
        if name in alike:
            rest = {k: v for k, v in value.items() if k not in alike[name]}
        if rest:
            inner = f"{heading}, {words(name)}" if heading else words(name)
            yield from tables(rest, inner)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Values that fit into a cell: neither mappings, nor empty or nested lists."""
    return {name: value for name, value in record.items() if value != [] and is_plain(value)}


def _alike(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The plain values of each part, if there are several parts and all have the same keys."""
    found = {name: _plain(value) for name, value in parts.items() if isinstance(value, Mapping)}
    names = {tuple(plain) for plain in found.values()}
    return found if len(found) > 1 and len(names) == 1 and names != {()} else {}


def _listed(rows: Sequence[Any], heading: str) -> Iterator[Table]:
    """Mappings as rows under the union of their keys; other values one per row."""
    if not all(isinstance(row, Mapping) for row in rows):
        yield Table([(cell_of("", row),) for row in rows], heading=heading)
        return
    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    cells = [[cell_of(name, row.get(name)) for name in names] for row in rows]
    yield Table(cells, [words(name) for name in names], heading)


def is_plain(value: Any) -> bool:
    """Whether a value fits into a cell: not a mapping, and not a list of mappings or lists."""
    if isinstance(value, list):
        return all(not isinstance(item, Mapping | list) for item in value)
    return not isinstance(value, Mapping)


def cell_of(name: str, value: Any) -> Cell:
    """A value of a JSON record as a cell; its unit is recognized by its name."""
    if isinstance(value, list) and is_plain(value):
        return ", ".join(cell(item) for item in value)
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    known = name.rpartition("/")[2]
    return next((show(value) for ends, show in UNITS.items() if known.endswith(ends)), value)


UNITS: Mapping[tuple[str, ...], Callable[[float], str]] = {
    ("bytes", "memory"): units.size,
    ("flops_per_second",): lambda rate: f"{rate / 1e9:,.1f} GFLOP/s",
    ("tokens_per_second",): units.count,
    ("seconds",): units.duration,
    ("mfu",): lambda part: units.share(part, 1),
}
"""Formats of numbers, by how their names end."""


def words(name: str) -> str:
    return name.replace("_", " ")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text: the first column is left-aligned, the others are right-aligned."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    ]


@functools.cache
def templates(html: bool = True) -> jinja2.Environment:
    """The Jinja environment of the templates, in which values of `html` pages are escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=html,  # prompts and answers may contain HTML
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    query = functools.partial(urlencode, doseq=True)
    found.filters |= {"cell": cell, "with_pictures": with_pictures, "query": query}
    found.tests["exact"] = is_exact
    if html:
        found.globals["parts"] = found.get_template("parts.html.jinja").module
    return found


def rendered(template: str, **values: Any) -> str:
    """The text of a page or a card from its template, which may say when it was `made`."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return templates(".html" in template).get_template(template).render(values, made=made)


def with_pictures(text: str, images: object = ()) -> Markup:
    """HTML of a text that shows images, given by their `data:` URLs, in their places."""
    first, *pieces = text.split(PLACE)
    urls = images if isinstance(images, list) and len(images) >= len(pieces) else []
    shown = [Markup('<img src="{}" alt="image">').format(url) for url in urls]
    found = [escape(first)]
    for image, piece in itertools.zip_longest(shown[: len(pieces)], pieces, fillvalue=PLACE):
        found += [Markup(image), escape(piece)]
    return Markup("").join(found)


def cell(value: Cell) -> str:
    """A value as text: integers exactly, floats with six digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else value
