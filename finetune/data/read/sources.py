"""Read rows of a recipe's files and hub data sets, with their locations for error messages."""

import difflib
import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.data.formats import FORMATS, find_format
from finetune.data.read.arrow import File
from finetune.data.read.columns import OF_TURNS, names_in, rewritten
from finetune.data.read.files import kind_of_file, read_file, why_not_read
from finetune.data.read.hub import hub_rows
from finetune.data.read.remote import fetched, remote_files
from finetune.data.read.splits import by_names, choose, splits_of
from finetune.data.samples import READ_AS
from finetune.data.values import Unreadable, json_text
from finetune.errors import FinetuneError, did_you_mean, refuse
from finetune.recipe import Data, Recipe
from finetune.runs.addresses import is_address

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

WORDS = {
    "text": "texts and conversations",
    "pairs": "pairs of a chosen and a rejected answer",
    "judged": "answers with a label that says whether each is wanted",
    "labelled": "sequences with a label",
    "prompts": "prompts without an answer",
}
"""Descriptions of the kinds of samples, for error messages."""

ABOUT = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
"""Names of metadata files of a data set, which have no rows."""
SAVED = "state.json"
"""Metadata of a data set that `Dataset.save_to_disk` wrote, with the names of its files."""


@dataclass(frozen=True)
class SourceRow:
    """A row before its format is applied."""

    file: str
    """The file, or the hub data set and its split, as shown in errors."""
    number: int
    """Row number, from 1; the line number in JSONL and text files."""
    value: Any
    """The row after `columns` is applied; `Unreadable` if it could not be read."""

    @property
    def place(self) -> str:
        return f"{self.file} row {self.number}"


@dataclass(frozen=True)
class Source:
    """A section of a recipe's data with its files; a hub data set has none."""

    data: Data
    files: tuple[File, ...]
    unread: tuple[Path, ...] = ()
    """Files of a folder or glob that have an unsupported type."""
    outside: tuple[Path, ...] = ()
    """Files of a folder that belong to none of its splits."""
    folders: tuple[Path, ...] = ()
    """Folders that a glob matches without a file in them."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield rows in order, at most `first`.

        Raises FinetuneError if they cannot be read, or, after the last row, if no row had a column
        that `columns` names.
        """
        data, there = self.data, set[str]()
        missing = {theirs for theirs, ours in data.columns.items() if ours is not None}
        for row in islice(self._part(), data.first):
            if missing and isinstance(row.value, Mapping):
                names = names_in(row.value)
                missing -= names
                there |= names
            yield self.rewritten(row)
        if missing and there:
            (first, *_) = sorted(missing)
            raise FinetuneError(
                f"data.columns: no row of {data.source} has a column '{first}'"
                f"{did_you_mean(first, there)}; its columns are {', '.join(sorted(there))}"
            )

    def rewritten(self, row: SourceRow) -> SourceRow:
        """A row with the names, roles and texts that the section asks for."""
        data = self.data
        changes = bool(data.columns or data.roles or data.replace or data.system)
        if not changes or not isinstance(row.value, Mapping):
            return row
        return SourceRow(row.file, row.number, _rewritten(row.value, data))

    def _part(self) -> Iterator[SourceRow]:
        """The rows of the part of the split that is read; the hub's library cuts its own."""
        if not self.files or self.data.split == self.data.split_name:
            return self._rows()
        return islice(self._rows(), *self.data.part(sum(1 for _ in self._rows())))

    def _rows(self) -> Iterator[SourceRow]:
        if not self.files:
            for number, value in enumerate(hub_rows(self.data), 1):
                yield SourceRow(f"{self.data.source} ({self.data.split})", number, value)
        for path in self.files:
            for number, value in read_file(path):
                yield SourceRow(str(path), number, value)


def _rewritten(row: Mapping[str, Any], data: Data) -> Any:
    try:
        return rewritten(row, data)
    except KeyError as error:
        theirs = next(name for name, ours in data.columns.items() if ours == error.args[0])
        return Unreadable(
            f"columns renames '{theirs}' to '{error.args[0]}', but the row also has a column of "
            f'that name; leave that one out: {{"{error.args[0]}": null}}',
            json_text(row),
        )


def find_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """Sources of `data` and `eval_data`.

    Raises FinetuneError with every problem: unknown formats, missing files.
    """
    problems = list[str]()
    if not recipe.data:
        problems.append("data: the recipe has no data; use with_data(Data(source, format))")
    found: tuple[list[Source], list[Source]] = ([], [])
    sections = {"data": recipe.data, "eval_data": recipe.eval_data}
    for sources, (name, section) in zip(found, sections.items(), strict=True):
        for number, data in enumerate(section):
            place = f"{name}.{number}" if len(section) > 1 else name
            try:
                _refuse_unfit(recipe, data.format, f"{place}.format")
                sources.append(find_source(data))
            except FinetuneError as error:
                problems.extend(error.problems)
    refuse(problems)
    return found


def _refuse_unfit(recipe: Recipe, name: str, field: str) -> None:
    """Refuse a format whose samples the method cannot use."""
    readable = READ_AS[recipe.takes]
    if find_format(name).gives not in readable:
        known = ", ".join(n for n, each in sorted(FORMATS.items()) if each.gives in readable)
        raise FinetuneError(
            f"{field}: '{name}' gives {WORDS[find_format(name).gives]}, but method "
            f"'{recipe.method}' learns from {WORDS[recipe.takes]} (formats: {known})"
        )


def find_source(data: Data) -> Source:
    """Find the files of a section; raises FinetuneError if there are none."""
    _check_columns(data)
    source = _found(data)
    if source.files:
        _refuse(data, "a local source", "revision")
    return source


def _check_columns(data: Data) -> None:
    """Refuse names in `columns` that the format does not read, or that two columns would share."""
    if data.format not in FORMATS and ":" not in data.format:
        return
    data_format = find_format(data.format)
    columns = {theirs: ours for theirs, ours in data.columns.items() if OF_TURNS not in theirs}
    named = [ours for ours in columns.values() if ours is not None]
    needed = [column for columns in data_format.columns for column in columns]
    known = list(dict.fromkeys((*needed, *data_format.optional)))
    for ours in named:
        if ours not in known:
            swapped = any(theirs in known for theirs in data.columns)
            hint = "; columns maps names of the file to those of the format" if swapped else ""
            raise FinetuneError(
                f"data.columns: format '{data.format}' does not read a column '{ours}'"
                f"{did_you_mean(ours, known)}; it reads {', '.join(known)}{hint}"
            )
        if named.count(ours) > 1:
            raise FinetuneError(
                f"data.columns: two columns would be renamed to '{ours}'; rename only one of them"
            )


def _found(data: Data) -> Source:
    if is_address(data.source) and data.stream:
        return _streamed(data)
    if is_address(data.source):
        return replace(_found(replace(data, source=str(fetched(data.source)))), data=data)
    if glob.has_magic(data.source) and not os.path.exists(data.source):
        return _globbed(data)
    path = Path(os.path.expanduser(data.source))
    if (path / "dataset_dict.json").is_file():
        _refuse(data, "a saved data set", "subset")
        path = _saved_split(path, data.split_name)
        return Source(data, _saved_files(path) or tuple(sorted(path.glob("*.arrow"))))
    saved = _saved_files(path)
    if saved is not None:
        _refuse(data, "a single saved split", "split", "subset")
        return Source(data, saved)
    if path.is_dir():
        return _folder(data, path)
    if path.is_file():
        if kind_of_file(path) is None:
            raise FinetuneError(f"data.source: {why_not_read(path)}")
        _refuse(data, "a file", "split", "subset")
        return Source(data, (path,))
    known = kind_of_file(path) is not None
    if known or path.is_absolute() or not HUB_NAME.fullmatch(data.source):
        raise FinetuneError(f"data.source: no such file or folder: {data.source}{_path_hint(path)}")
    return Source(data, ())


def _streamed(data: Data) -> Source:
    """The files of an address, which stay there."""
    there = {PurePosixPath(name): file for name, file in remote_files(data.source).items()}
    kept = {n: f for n, f in there.items() if kind_of_file(f) and n.name not in ABOUT}
    if not kept:
        raise FinetuneError(f"data.source: '{data.source}' has no file that can be read")
    outside = tuple[PurePosixPath, ...]()
    if len(there) > 1 and "*" not in data.source:
        splits = by_names(PurePosixPath(), sorted(kept))
        within = {name for members in splits.values() for name in members}
        outside = tuple(name for name in sorted(kept) if name not in within)
        chosen = choose(PurePosixPath(), splits, data.split_name, outside)
        kept = {name: kept[name] for name in chosen}
    else:
        _refuse(data, "a file" if len(there) == 1 else "a pattern of files", "split", "subset")
    unread = tuple(Path(name) for name in there if kind_of_file(there[name]) is None)
    return Source(data, tuple(kept[n] for n in sorted(kept)), unread, tuple(map(Path, outside)))


def _globbed(data: Data) -> Source:
    found = sorted(Path(name) for name in glob.glob(data.source, recursive=True))
    files, unread = _by_kind(found)
    if not files:
        why = f"; {why_not_read(unread[0])}" if unread else ""
        what = f"matches {len(found)} paths, but no file that can be read{why}"
        what += "; name a folder, or use ** for the files in folders" * any(map(Path.is_dir, found))
        raise FinetuneError(f"data.source: '{data.source}' {what if found else 'matches nothing'}")
    _refuse(data, "a pattern of files", "split", "subset")
    inside = {parent for file in (*files, *unread) for parent in file.parents}
    folders = tuple(p for p in found if p.is_dir() and p not in inside and any(p.iterdir()))
    return Source(data, files, unread, folders=folders)


def _folder(data: Data, path: Path) -> Source:
    inside = sorted(_files_in(path))
    saved = {each: files for each in {p.parent for p in inside} if (files := _saved_files(each))}
    rows = [p for p in inside if p.name not in ABOUT and p in saved.get(p.parent, (p,))]
    files, unread = _by_kind(rows)
    unread = tuple(sorted({*unread, *inside} - {*files}))
    if not files:
        why = f"; {why_not_read(unread[0])}" if unread else ""
        raise FinetuneError(f"data.source: the folder {path} has no file that can be read{why}")
    splits = splits_of(path, files, data.subset)
    within = {file for members in splits.values() for file in members}
    outside = tuple(file for file in files if file not in within)
    return Source(data, tuple(choose(path, splits, data.split_name, outside)), unread, outside)


def _saved_split(path: Path, split: str) -> Path:
    """The folder of a split that `DatasetDict.save_to_disk` wrote."""
    there = sorted(each.name for each in path.iterdir() if each.is_dir())
    if split not in there:
        raise FinetuneError(
            f"data.split: {path} has no split '{split}'{did_you_mean(split, there)}; it has "
            f"{', '.join(there)}"
        )
    return path / split


def _saved_files(path: Path) -> tuple[Path, ...] | None:
    """The files of a data set that `Dataset.save_to_disk` wrote; None for any other folder.

    Files of an earlier, larger data set and caches of `Dataset.map` may be in the same folder.
    """
    if not (path / SAVED).is_file():
        return None
    try:
        state = json.loads((path / SAVED).read_text(encoding="utf-8"))
        names = [each["filename"] for each in state["_data_files"]]
    except (ValueError, LookupError, TypeError):
        return None
    if state.get("_indices_data_files"):
        raise FinetuneError(
            f"data.source: {path} has a mapping of indices, as older versions of `datasets` wrote; "
            f"save it again: load_from_disk(...).flatten_indices().save_to_disk(...)"
        )
    missing = next((name for name in names if not (path / name).is_file()), None)
    if missing is not None:
        raise FinetuneError(f"data.source: {path / SAVED} names {missing}, which is missing")
    return tuple(path / name for name in names)


def _refuse(data: Data, what: str, *names: str) -> None:
    """Refuse fields that a source has no use for."""
    for name in names:
        value = data.split_name if name == "split" else getattr(data, name)
        if value not in (None, False, "train"):
            raise FinetuneError(
                f"data.{name}: {data.source} is {what} and has no {name}s, got {value!r}; leave it "
                "out" + ", or name the file of that split" * (name == "split")
            )


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, also of linked folders in it, each once; no hidden ones."""

    def fail(error: OSError) -> None:
        raise FinetuneError(f"data.source: {error.filename}: {error.strerror}")

    seen = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        yield from (Path(root, name) for name in names if not name.startswith("."))
        there = sorted(name for name in folders if not name.startswith("."))
        folders.clear()
        for name in there:
            real = os.path.realpath(os.path.join(root, name))
            if real not in seen:
                folders.append(name)
                seen.add(real)


def _by_kind(paths: list[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Divide paths into readable and other files; folders are ignored.

    Raises FinetuneError for a link to a missing file.
    """
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise FinetuneError(
                f"data.source: {path} links to {os.readlink(path)}, which does not exist; mount or "
                "restore it, or remove the link"
            )
    files = [path for path in paths if path.is_file()]
    return (
        tuple(path for path in files if kind_of_file(path) is not None),
        tuple(path for path in files if kind_of_file(path) is None),
    )


def _path_hint(path: Path) -> str:
    """A hint for a missing file: a similar name in its folder, or that the folder is missing."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    close = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""
