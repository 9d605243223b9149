"""Encoded rows of a source, taken from an earlier preparation in the same cache.

Prepared rows have in sections.json what a preparation with another weight, packing or other sources
needs of each source: its key, its documents, and its tally; facts.npz has `Facts` of documents.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.audit import Facts
from finetune.data.read.sources import Source, SourceRow
from finetune.data.rows.encode import BadRow, Encoded
from finetune.data.rows.store import open_documents
from finetune.data.rows.stored_images import open_images
from finetune.data.tally import Tally
from finetune.errors import FinetuneError
from finetune.runs.manifest import differing, sealed
from finetune.runs.run import write_json

COUNTS = "counts.json"
BAD_ROWS = "bad_rows.jsonl"
"""A file next to the prepared rows that lists the dropped rows with their problems."""
SECTIONS, FACTS = "sections.json", "facts.npz"


@dataclass
class Section:
    """A source with its tally and its rows."""

    source: Source
    tally: Tally = field(default_factory=Tally)
    members: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Row numbers; each row has `documents_per_row` adjacent documents."""
    files: dict[str, None] = field(default_factory=dict[str, None])
    """Names of its files with rows."""
    part: Iterator[SourceRow] | None = None
    """Some rows of the source; None for all of them."""
    kept: "Kept | None" = None
    """Its encoded rows, if they need not be encoded again."""


def sound_counts(folder: Path, check: bool) -> dict[str, Any]:
    """The verified counts of prepared rows.

    Raises:
        ValueError: the counts, or with `check` another file, differ from what was written.
    """
    read = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
    if not isinstance(read, dict) or sealed(read)["sha256"] != read.get("sha256"):
        raise ValueError(f"{COUNTS}: its sha256 does not match its content")
    wrong = differing(folder, read["content"]) if check else []
    if wrong:
        raise ValueError("; ".join(wrong))
    return {name: value for name, value in read.items() if name not in ("content", "sha256")}


def save_sections(
    folder: Path, keys: list[str], sections: list[Section], facts: Facts, each: int
) -> None:
    """Write what `find_kept` needs of encoded sources; rows have `each` documents."""
    np.savez(folder / FACTS, **vars(facts))
    listed = [
        {
            "key": key,
            "documents": each * len(section.members),
            "files": list(section.files),
            "tally": vars(section.tally),
        }
        for key, section in zip(keys, sections, strict=True)
    ]
    write_json(folder / SECTIONS, listed)


@dataclass(frozen=True)
class Kept:
    """The encoded rows of a source in a folder of the cache."""

    folder: Path
    files: list[str]
    """Names by the file numbers of all documents."""
    about: dict[str, Any]
    """The source in sections.json."""
    first: int
    """Its first document."""
    bad: int
    """Bad rows of the sources before it."""

    def encoded(self, number: int, images: bool) -> Iterator[Encoded]:
        """Yield the rows as section `number`, one file after another, as if they were encoded.

        Args:
            images: whether the model reads images.
        """
        found = open_documents(self.folder / "documents")
        with np.load(self.folder / FACTS) as loaded:
            facts = Facts(**loaded)
        told: dict[str, Any] = self.about["tally"]
        tally, bad = Tally(**told), self._bad_rows(told["counts"].get("bad", 0))
        for name in ("counts", "roles", "columns"):  # JSON has no counters
            setattr(tally, name, Counter[str](told[name]))
        first, end = self.first, self.first + self.about["documents"]
        origins = found.origins[first:end, 0]
        for file in self.about["files"]:
            behind = first + int(np.count_nonzero(origins == self.files.index(file)))
            part, documents = slice(first, behind), range(first, behind)
            tokens = slice(*found.offsets[[first, behind]])
            yield Encoded(
                number, file, found.ids[tokens], found.trained[tokens], found.lengths[part],
                found.origins[part, 1], facts.trained[part], facts.ended[part],
                facts.digests[part], {name: v[part] for name, v in found.columns.items()},
                [] if found.json is None else list(map(found.reward_text, documents)),
                list(map(found.images_of, documents)) if images else [], tally, [], bad,
            )  # fmt: skip
            found.release()
            first, tally, bad = behind, Tally(), []

    def _bad_rows(self, count: int) -> list[BadRow]:
        if not count:
            return []
        with (self.folder / BAD_ROWS).open(encoding="utf-8") as lines:
            rows = list(map(json.loads, islice(lines, self.bad, self.bad + count)))
        return [BadRow(row["file"], row["row"], row["problem"], row["value"]) for row in rows]


def find_kept(cache: Path, keys: list[str]) -> dict[str, Kept]:
    """The encoded rows of sources by their keys, of those that a cache has in sound folders."""
    found: dict[str, Kept] = {}
    for listed in sorted(cache.glob(f"[!.]*/{SECTIONS}")):
        folder, first, bad, here = listed.parent, 0, 0, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, FinetuneError):
            for about in json.loads(listed.read_text(encoding="utf-8")):
                if about["key"] in keys and about["key"] not in found:
                    here[about["key"]] = about, first, bad
                first += about["documents"]
                bad += about["tally"]["counts"].get("bad", 0)
            if here:
                images = open_images(folder / "documents")
                if images is not None:
                    images.refuse_changed(folder)
                files = sound_counts(folder, check=True)["files"]
                found |= {key: Kept(folder, files, *rest) for key, rest in here.items()}
    return found
