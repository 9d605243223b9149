"""Prepare a recipe's data as memory-mapped rows, written once and used by every process.

The result is in `cache/KEY/`, where the key is a hash of everything that it depends on. The folder
is renamed into place when it is complete:

    counts.json   rows, tokens, trained tokens, dropped, truncated, ..., by split and by source;
                  size and SHA-256 of every other file and of itself
    bad_rows.jsonl   rows that `on_bad_row=drop` dropped, each with its problem
    sections.json  facts.npz   each source, for other recipes with the same (`finetune.data.kept`)
    documents/  train/  eval/   token ids and each row's documents (`finetune.data.rows.store`)

Tokens are written to disk as they are produced: memory holds a few numbers per document.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.audit import Facts, count_rows
from finetune.data.chat.render import Chat
from finetune.data.fingerprint import fingerprint, source_keys
from finetune.data.images.inputs import ImageInputs
from finetune.data.kept import (
    BAD_ROWS,
    COUNTS,
    Section,
    find_kept,
    save_sections,
    sound_counts,
)
from finetune.data.problems import Problems, check_source
from finetune.data.read.mixture import hold_out, mix
from finetune.data.read.sources import Source, find_sources
from finetune.data.rows.encode import BadRow, Chunk, Encoded, Encoder
from finetune.data.rows.encode_pool import encode
from finetune.data.rows.packing import pack
from finetune.data.rows.store import (
    Documents,
    DocumentWriter,
    Rows,
    TokenColumn,
    check_origins,
    documents_of_rows,
    open_documents,
    open_rows,
    save_rows,
)
from finetune.data.scratch import scratch_for
from finetune.data.values import Unreadable, json_text
from finetune.errors import FinetuneError, reading
from finetune.process.progress import counted
from finetune.recipe import Recipe
from finetune.runs.manifest import sealed, sha256

CHUNK = 256
"""Rows that are encoded at a time."""
BEGINNING = 1000
"""Rows of each stream that are prepared, and checked, before training."""


@dataclass(frozen=True)
class Prepared:
    """Rows for training and evaluation, with counts of the data."""

    train: Rows
    eval: Rows
    counts: dict[str, Any]
    """{"train": {...}, "eval": {...}}: see `audit.count_rows`; and the "files" of the rows."""
    folder: Path

    @property
    def bad_rows(self) -> Path | None:
        """The file that lists the dropped bad rows; None if there are none."""
        path = self.folder / BAD_ROWS
        return path if path.is_file() else None

    def side_by_side(self, free: bool, shared: bool = False) -> "Prepared":
        """The same rows, concatenated in a micro-batch without padding, or padded.

        `shared` is whether concatenated rows share a prompt that they start with.
        """
        return self._with_both(padding_free=free, share_prompts=shared)

    def with_image_inputs(self, inputs: ImageInputs | None) -> "Prepared":
        """The same rows, whose images become inputs of the model in this way."""
        return self._with_both(image_inputs=inputs)

    def with_columns(
        self,
        columns: dict[str, np.ndarray],
        train_reference: np.ndarray | None = None,
        eval_reference: np.ndarray | None = None,
    ) -> "Prepared":
        """The same rows with more values for each document, and for each step if given."""
        train, held_out = (
            dataclasses.replace(
                rows,
                columns={**rows.columns, **columns},
                step_reference=rows.step_reference if reference is None else reference,
            )
            for rows, reference in ((self.train, train_reference), (self.eval, eval_reference))
        )
        return dataclasses.replace(self, train=train, eval=held_out)

    def with_token_columns(self, columns: dict[str, TokenColumn]) -> "Prepared":
        """The same rows with values for each label, by name."""
        return self._with_both(token_columns=columns)

    def _with_both(self, **changes: Any) -> "Prepared":
        train, held_out = (dataclasses.replace(rows, **changes) for rows in (self.train, self.eval))
        return dataclasses.replace(self, train=train, eval=held_out)

    def place(self, document: int) -> str:
        """The file and row of a document."""
        file, number = self.train.documents.origins[document]
        return f"{self.counts['files'][file]} row {number}"


def prepare(recipe: Recipe, chat: Chat, cache: Path, check: bool = True) -> Prepared:
    """Prepare the rows of a recipe's data, or open them if they are cached.

    `check` compares the cached files with the hashes taken when they were written.

    Raises FinetuneError with the problems of the data, each with its file and row.
    """
    recipe = beginning(recipe)
    sources, eval_sources = find_sources(recipe)
    # With a hash of every file: a folder of the cache is never out of date, nor changed.
    both = [*sources, *eval_sources]
    keys = source_keys(recipe, chat, both)
    folder = cache / fingerprint(recipe, both, keys)
    if not (folder / COUNTS).is_file():
        _write(folder, recipe, chat, both, keys)
    instead = "delete that folder to prepare the data again"
    with reading(f"{folder}: the prepared data is damaged", instead):
        counts = sound_counts(folder, check)
        documents = open_documents(folder / "documents")
        check_origins(documents, len(counts["files"]))
        train, evaluation = (
            open_rows(documents, folder / name, recipe.batch.packing) for name in ("train", "eval")
        )
    if check and documents.images is not None:
        documents.images.refuse_changed(folder)
    return Prepared(train, evaluation, counts, folder)


def beginning(recipe: Recipe) -> Recipe:
    """A recipe whose streams end after their first rows, which say what the others are like."""
    if not recipe.streams:
        return recipe
    data = (
        dataclasses.replace(each, stream=True, first=min(each.first or BEGINNING, BEGINNING))
        for each in recipe.data
    )
    return dataclasses.replace(recipe, data=tuple(data))


def _write(
    folder: Path, recipe: Recipe, chat: Chat, sources: list[Source], keys: list[str]
) -> None:
    """Write the result to a scratch folder and rename it into place."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_for(folder) as scratch:
            _fill(scratch, folder.parent, recipe, chat, sources, keys)
            # The keys are older than the reading: rows written in between would be found by them.
            if source_keys(recipe, chat, sources) != keys:
                names = dict.fromkeys(each.data.source for each in sources)
                raise FinetuneError(
                    f"data: {', '.join(names)}: changed while it was read; start again when no "
                    "process writes to it"
                )
            scratch.rename(folder)
    except OSError as error:
        if not (folder / COUNTS).is_file():  # else another process was faster
            raise FinetuneError(f"{folder}: cannot write the prepared data: {error}") from None


def _fill(
    folder: Path, cache: Path, recipe: Recipe, chat: Chat, sources: list[Source], keys: list[str]
) -> None:
    known = find_kept(cache, keys)
    sections = [
        Section(source, kept=known.get(key)) for source, key in zip(sources, keys, strict=True)
    ]
    train, held_out = sections[: len(recipe.data)], sections[len(recipe.data) :]
    documents, facts, files = encode_sections(folder / "documents", Encoder(recipe, chat), sections)
    save_sections(folder, keys, sections, facts, recipe.documents_per_row)
    kept = np.empty(0, np.int64)
    if recipe.duplicates == "drop":
        _drop_repeated(sections, facts.digests[:: recipe.documents_per_row])
    if recipe.eval_rows and not held_out:
        origins = documents.origins[:: recipe.documents_per_row]
        # Before weights repeat rows: a copy of a held-out row must not be trained.
        kept = _hold_out(train, origins, recipe)
    counts: dict[str, Any] = {}
    members: dict[str, np.ndarray] = {}
    for name, parts, besides in (("train", train, kept[:0]), ("eval", held_out, kept)):
        mixed = mix([each.members for each in parts], [p.source.data for p in parts], recipe.seed)
        # Packs and repetitions are only numbers: each document is on disk once.
        rows = made_rows(documents, np.concatenate([besides, *mixed]), recipe)
        save_rows(rows, folder / name)
        members[name] = np.unique(rows.members)
        shares = [(each.source.data, each.tally, m) for each, m in zip(parts, mixed, strict=True)]
        counts[name] = count_rows(rows, facts, shares, recipe, files)
        counts[name]["left_out"] = sum(
            len(each.members) - len(m)
            for each, m in zip(parts, mixed, strict=True)
            if each.source.data.weight is not None
        )
        counts[name]["unread"] = [str(path) for each in parts for path in each.source.unread]
        counts[name]["outside"] = [str(path) for each in parts for path in each.source.outside]
        counts[name]["folders"] = [str(path) for each in parts for path in each.source.folders]
        counts[name]["without_rows"] = [
            str(path)
            for each in parts
            for path in each.source.files
            if each.source.data.first is None and str(path) not in files
        ]
    _count_shared(counts, documents, facts, files, members, recipe.documents_per_row)
    counts |= {"files": files, "pad_is_eos": _pad_is_eos(chat)}
    talks = not {"user", "assistant"}.isdisjoint(counts["train"]["roles"])
    counts["train"]["fixed_date"] = talks and chat.reads_the_date
    # Last, when every other file is complete.
    counts["content"] = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    # Sealed as JSON gives it back: tuples are lists there, and numbers as keys are texts.
    written = json.dumps(sealed(json.loads(json.dumps(counts))), indent=2)
    (folder / COUNTS).write_text(written + "\n", encoding="utf-8")


def _count_shared(
    counts: dict[str, Any],
    documents: Documents,
    facts: Facts,
    files: list[str],
    members: dict[str, np.ndarray],
    per_row: int,
) -> None:
    """Count evaluation rows that are equal to a training row."""
    trained, held_out = facts.digests[members["train"]], facts.digests[members["eval"]]
    shared = members["eval"][np.isin(held_out, trained)]
    counts["eval"]["also_trained"] = len(shared) // per_row
    if len(shared):
        twin = members["train"][trained == facts.digests[shared[0]]][0]
        first, second = (
            f"{files[file]} row {row}" for file, row in documents.origins[[shared[0], twin]]
        )
        place = first if first == second else f"{first}, as {second}"
        counts["eval"]["first"]["also_trained"] = place


def encode_sections(
    folder: Path,
    encoder: Encoder,
    sections: list[Section],
    encode_all: Callable[[Iterable[Chunk]], Iterator[Encoded]] | None = None,
) -> tuple[Documents, Facts, list[str]]:
    """Encode every source into a folder; returns the documents, facts about them, and the files.

    Args:
        encode_all: encodes chunks of parts of sources, of which others may follow.
    """
    writer, problems, facts = DocumentWriter(folder), Problems(), list[Facts]()
    files: dict[str, int] = {}
    members: list[list[np.ndarray]] = [[] for _ in sections]
    written = 0
    if encode_all is None:
        chunks = counted(
            _encoded(encoder, sections), "preparing", size=lambda each: len(each.lengths)
        )
    else:
        chunks = encode_all(_chunks(enumerate(sections)))
    for encoded in chunks:
        for place, problem in encoded.problems:
            problems.add(place, problem)
        sections[encoded.section].tally.add(encoded.tally)
        _list_bad_rows(folder.with_name(BAD_ROWS), encoded.bad)
        if problems.enough:
            break
        count = len(encoded.lengths) // encoder.recipe.documents_per_row
        sections[encoded.section].files[encoded.file] = None
        file = files.setdefault(encoded.file, len(files))
        origins = np.stack([np.full_like(encoded.numbers, file), encoded.numbers], axis=1)
        writer.append(
            encoded.ids, encoded.trained, encoded.lengths, origins, encoded.columns,
            encoded.beside, encoded.images,
        )  # fmt: skip
        facts.append(Facts(encoded.trained_tokens, encoded.ended, encoded.digests))
        # Rows are numbered over all sources, in the order in which their documents are written.
        members[encoded.section].append(np.arange(written, written + count))
        written += count
    for section, parts in zip(sections, members, strict=True):
        section.members = np.concatenate([section.members, *parts])
    if not problems.found:  # checks need complete sources
        for section in sections:
            rows = len(section.members)
            if section.part is not None:  # it may have none here, and some in another buffer
                rows = written
            problems.add_all(check_source(section.source.data, section.tally, rows, encoder.recipe))
    documents = writer.close()
    problems.raise_any()
    return documents, Facts.joined(facts), list(files)


def _list_bad_rows(path: Path, bad: list[BadRow]) -> None:
    """Append dropped rows with their problems to the list of bad rows."""
    if not bad:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for each in bad:
            value = each.value
            if isinstance(value, Unreadable):
                value = value.text
            line = {"file": each.file, "row": each.number, "problem": each.problem, "value": value}
            file.write(json_text(line) + "\n")


def _encoded(encoder: Encoder, sections: list[Section]) -> Iterator[Encoded]:
    """Yield the rows of all sources, encoded now or taken from earlier preparations."""
    for again, group in groupby(enumerate(sections), key=lambda each: each[1].kept is None):
        if again:
            yield from encode(encoder, _chunks(group))
            continue
        for number, section in group:
            assert section.kept is not None
            yield from section.kept.encoded(number, encoder.chat.images is not None)


def _chunks(sections: Iterable[tuple[int, Section]]) -> Iterator[Chunk]:
    """Yield the rows of sources in chunks of one file; a source ends at a read error."""
    for number, section in sections:
        data = section.source.data
        drops = data.on_bad_row == "drop"
        rows, file = list[tuple[int, object]](), data.source
        try:
            for row in section.source.rows() if section.part is None else section.part:
                # A chunk is of one file, which names the places of its problems.
                if rows and (row.file != file or len(rows) == CHUNK):
                    yield Chunk(number, data.format, file, rows, drops_bad_rows=drops)
                    rows = []
                file = row.file
                rows.append((row.number, row.value))
        except FinetuneError as error:
            yield Chunk(number, data.format, file, rows, tuple(error.problems), drops)
            continue
        if rows:
            yield Chunk(number, data.format, file, rows, drops_bad_rows=drops)


def _hold_out(sections: list[Section], origins: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Remove rows from the training data for evaluation, before sources are mixed."""
    everything = np.concatenate([section.members for section in sections])
    count = recipe.held_out(len(everything))
    chosen = hold_out(everything, origins[everything], count, recipe.seed)
    for section in sections:
        section.members = section.members[~np.isin(section.members, chosen)]
    return chosen


def _drop_repeated(sections: list[Section], digests: np.ndarray) -> None:
    """Remove rows whose digest, (rows,), is that of an earlier one, and count them."""
    _, first = np.unique(digests, return_index=True)  # rows are numbered in the sections' order
    for section in sections:
        kept = np.isin(section.members, first)
        section.tally.counts["repeated"] += len(kept) - int(kept.sum())
        section.members = section.members[kept]


def made_rows(documents: Documents, chosen: np.ndarray, recipe: Recipe) -> Rows:
    """Rows from row numbers: as they are, or packed by the sum of their documents' lengths."""
    each = recipe.documents_per_row
    members = documents_of_rows(chosen, each)
    if not recipe.batch.packing:
        return Rows(documents, members, np.arange(len(chosen) + 1) * each, packed=False)
    lengths = documents.lengths[members].reshape(-1, each).sum(axis=1)
    order, bounds = pack(lengths, recipe.row_length)
    return Rows(documents, documents_of_rows(chosen[order], each), bounds * each, packed=True)


def _pad_is_eos(chat: Chat) -> bool:
    eos = chat.tokenizer.eos_token_id
    return eos is not None and chat.tokenizer.pad_token_id == eos
