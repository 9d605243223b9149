"""Find the splits of a local folder by the naming rules of the hub.

The first rule that applies is used: `configs` in the front matter of README.md, names such as
`data/train-00000-of-00002.parquet`, keywords in folder names, keywords in file names. If none
applies, all files belong to the split `train`.
"""

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

Splits = dict[str, list[Path]]


def splits_of(folder: Path, files: Sequence[Path], subset: str | None) -> Splits:
    """Files of a folder by split, in order; a file may belong to no split.

    Raises:
        FinetuneError: README.md cannot be read, or the folder does not have the subset.
    """
    configured = _configured(folder, subset)
    if configured is not None:
        known = {path.resolve(): path for path in files}
        found = {
            name: sorted({known[p] for p in _matches(folder, patterns) if p in known})
            for name, patterns in configured.items()
        }
        return {name: paths for name, paths in found.items() if paths}
    if subset is not None:
        raise FinetuneError(
            f"data.subset: {folder} has no subsets (no `configs` in its README.md), got "
            f"'{subset}'; leave it out, or name a folder in it as data.source"
        )
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
    return in_folders or in_names or {"train": list(files)}


def choose(folder: Path, splits: Splits, split: str, outside: Sequence[Path] = ()) -> list[Path]:
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


def _some(paths: Sequence[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _has(words: str, name: str, behind: str = f"({BORDER}|$)") -> bool:
    """Whether a name contains one of the words, delimited by borders."""
    return re.search(f"(^|{BORDER})({words}){behind}", name, re.IGNORECASE) is not None


def _grouped(pairs: Iterable[tuple[str, Path]]) -> Splits:
    splits: Splits = {}
    for split, path in pairs:
        splits.setdefault(split, []).append(path)
    return splits


# README.md.


def _configured(folder: Path, subset: str | None) -> dict[str, list[str]] | None:
    """File patterns by split from the front matter of the data set card; None without `configs`."""
    configs = [each for each in _front_matter(folder) if each.get("data_files")]
    if not configs:
        return None
    names = [str(each.get("config_name", "default")) for each in configs]
    if subset is not None:
        chosen = [each for each, name in zip(configs, names, strict=True) if name == subset]
    else:
        chosen = [
            each
            for each, name in zip(configs, names, strict=True)
            if name == "default" or each.get("default") or len(configs) == 1
        ]
    if not chosen:
        got = "none" if subset is None else f"'{subset}'{did_you_mean(subset, names)}"
        raise FinetuneError(
            f"data.subset: {folder} has the subsets {', '.join(names)} in its README.md, got {got}"
        )
    return _patterns(chosen[0])


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


def _patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    files, folder = config["data_files"], config.get("data_dir")
    if isinstance(files, Mapping):
        given = dict(files)
    elif isinstance(files, list) and all(isinstance(each, Mapping) for each in files):
        given = {str(each.get("split", "train")): each.get("path", []) for each in files}
    else:
        given = {"train": files}
    listed = {
        name: [patterns] if isinstance(patterns, str) else list(patterns)
        for name, patterns in given.items()
    }
    if folder is None:
        return listed
    return {name: [f"{folder}/{each}" for each in patterns] for name, patterns in listed.items()}


def _matches(folder: Path, patterns: Sequence[str]) -> Iterable[Path]:
    for pattern in patterns:
        for name in glob.glob(pattern, root_dir=folder, recursive=True):
            yield (folder / name).resolve()
