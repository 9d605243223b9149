"""Find the splits of a local folder by the naming rules of the hub.

The first rule that applies is used: `configs` in the front matter of README.md, names such as
`data/train-00000-of-00002.parquet`, keywords in folder names, keywords in file names. If none
applies, all files belong to the split `train`.
"""

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

from finetune.errors import FinetuneError, did_you_mean, reading
from finetune.process.yaml_text import read_yaml

KEYWORDS = {
    "train": "training|train",
    "validation": "validation|valid|dev|val",
    "test": "testing|test|evaluation|eval",
}
"""Keywords in names that assign a file to a split."""
BORDER = r"[-._ 0-9]"
SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}[^/]*\.[^/]*")

AnyPath = TypeVar("AnyPath", bound=PurePath)
Splits = dict[str, list[Path]]


def splits_of(folder: Path, files: Sequence[Path], subset: str | None) -> Splits:
    """Files of a folder by split, in order; a file may belong to no split.

    Raises:
        FinetuneError: README.md cannot be read, or the folder does not have the subset.
    """
    config = _configured(folder, subset)
    inside = folder / str(config.get("data_dir") or "")
    if config.get("data_files"):
        known = {path.resolve(): path for path in files}
        found = {
            name: sorted({known[p] for p in _matches(inside, patterns) if p in known})
            for name, patterns in _patterns(config["data_files"]).items()
        }
        return {name: paths for name, paths in found.items() if paths}
    return by_names(inside, [path for path in files if path.is_relative_to(inside)])


def by_names(folder: PurePath, files: Sequence[AnyPath]) -> dict[str, list[AnyPath]]:
    """Files of a folder by split, from their names alone."""
    names = {path: path.relative_to(folder).as_posix() for path in files}
    sharded = {path: match[1] for path in files if (match := SHARD.fullmatch(names[path]))}
    if sharded:
        return _grouped((split, path) for path, split in sharded.items())
    in_folders = _grouped(
        (split, path)
        for path in files
        for split, words in KEYWORDS.items()
        if any(_has(words, part) for part in names[path].split("/")[:-1])
    )
    in_names = _grouped(
        (split, path)
        for path in files
        for split, words in KEYWORDS.items()
        if _has(words, path.name, behind=BORDER)
    )
    return in_folders or in_names or ({"train": files} if files else {})


def choose(
    folder: PurePath,
    splits: Mapping[str, list[AnyPath]],
    split: str,
    outside: Sequence[AnyPath] = (),
) -> list[AnyPath]:
    """The files of a split; `outside` are files without a split, for the error message.

    Raises:
        FinetuneError: the split does not exist, or one of its files belongs to another split too.
    """
    if split not in splits:
        shown = "; ".join(f"{name} ({_some(paths, folder)})" for name, paths in splits.items())
        others = f"; {_some(outside, folder)} in no split" if outside else ""
        raise FinetuneError(
            f"data.split: {folder} has no split '{split}'{did_you_mean(split, splits)}; it has "
            f"{shown or 'none'}{others}"
        )
    for path in splits[split]:
        others = [name for name, paths in splits.items() if name != split and path in paths]
        if others:
            raise FinetuneError(
                f"data.split: by its name {path} belongs to the splits {split} and "
                f"{' and '.join(others)}; rename it, or name it as data.source"
            )
    return splits[split]


def _some(paths: Sequence[PurePath], folder: PurePath) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _has(words: str, name: str, behind: str = f"({BORDER}|$)") -> bool:
    """Whether a name contains one of the words, delimited by borders."""
    return re.search(f"(^|{BORDER})({words}){behind}", name, re.IGNORECASE) is not None


def _grouped(pairs: Iterable[tuple[str, AnyPath]]) -> dict[str, list[AnyPath]]:
    splits: dict[str, list[AnyPath]] = {}
    for split, path in pairs:
        splits.setdefault(split, []).append(path)
    return splits


# README.md.


def _configured(folder: Path, subset: str | None) -> dict[str, Any]:
    """The subset's entry in the front matter of the data set card; empty without `configs`."""
    configs = [e for e in _front_matter(folder) if e.get("data_files") or e.get("data_dir")]
    if not configs and subset is None:
        return {}
    named = {str(each.get("config_name", "default")): each for each in configs}
    default = [each for each in configs if each.get("default") or len(configs) == 1]
    chosen = named.get(subset or "default") or next(iter(default if subset is None else ()), None)
    if not chosen:
        there = f"the subsets {', '.join(named)}" if named else "no subsets (no `configs`)"
        got = "none" if subset is None else f"'{subset}'{did_you_mean(subset, named)}"
        instead = "" if named else "; leave it out, or name a folder in it as data.source"
        raise FinetuneError(
            f"data.subset: {folder} has {there} in its README.md, got {got}{instead}"
        )
    return chosen


def _front_matter(folder: Path) -> list[dict[str, Any]]:
    card = folder / "README.md"
    if not card.is_file():
        return []
    text = card.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff")
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if match is None:
        return []
    with reading(f"{card}: its front matter is not YAML"):
        front = read_yaml(match[1])
    configs = front.get("configs") if isinstance(front, Mapping) else None
    if not isinstance(configs, list):
        return []
    return [dict(each) for each in configs if isinstance(each, Mapping)]


def _patterns(files: Any) -> dict[str, list[str]]:
    """File patterns by split, from one of the three forms of `data_files`."""
    if isinstance(files, Mapping):
        given = dict(files)
    elif isinstance(files, list) and all(isinstance(each, Mapping) for each in files):
        given = {str(each.get("split", "train")): each.get("path", []) for each in files}
    else:
        given = {"train": files}
    return {
        name: [patterns] if isinstance(patterns, str) else list(patterns)
        for name, patterns in given.items()
    }


def _matches(folder: Path, patterns: Sequence[str]) -> Iterable[Path]:
    for pattern in patterns:
        for name in glob.glob(pattern, root_dir=folder, recursive=True):
            yield (folder / name).resolve()
