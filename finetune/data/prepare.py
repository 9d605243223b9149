"""From a recipe's data to memory-mapped rows, written once and used by every process.

The result lies in `cache/KEY/`, where the key is a hash of all that it depends on. It appears whole
or not at all:

    counts.json   rows, tokens, trained tokens, dropped, truncated, ..., by split and by source
    train/  eval/ ids.npy, trained.npy, offsets.npy (`finetune.data.rows`)
"""

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.encode import FIELDS, Problems, Tally, check_source, encode_source
from finetune.data.order import permutation
from finetune.data.render import Chat
from finetune.data.rows import Columns, Rows, open_rows, pack_rows, save_rows
from finetune.data.sources import Source, find_sources, load_hub
from finetune.errors import FinetuneError
from finetune.recipe import Recipe

HELD_OUT = 2**64 - 1
"""The epoch whose shuffle chooses the rows that are held out; no training reaches it."""


@dataclass(frozen=True)
class Prepared:
    """Rows to train and to evaluate on, and what became of the data."""

    train: Rows
    eval: Rows
    counts: dict[str, Any]
    """{"train": {...}, "eval": {...}}: see `count_rows`."""
    folder: Path


def prepare(recipe: Recipe, chat: Chat, cache: Path) -> Prepared:
    """Rows of a recipe's data, from the cache where it has them.

    Raises FinetuneError with up to ten problems, each with its file and row.
    """
    sources, eval_sources = find_sources(recipe)
    key = fingerprint(recipe, chat, [*sources, *eval_sources])
    folder = cache / key
    if not (folder / "counts.json").is_file():
        train, evaluation, counts = _encode_all(recipe, chat, sources, eval_sources)
        _write(folder, train, evaluation, counts)
    counts = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    return Prepared(open_rows(folder / "train"), open_rows(folder / "eval"), counts, folder)


def _encode_all(
    recipe: Recipe, chat: Chat, sources: list[Source], eval_sources: list[Source]
) -> tuple[Rows, Rows, dict[str, Any]]:
    problems = Problems()
    tallies = [encode_source(recipe, chat, source, problems) for source in sources]
    eval_tallies = [encode_source(recipe, chat, source, problems) for source in eval_sources]
    if not problems.found:  # what is left of half a source says nothing
        for tally in (*tallies, *eval_tallies):
            problems.add_all(check_source(tally, recipe.batch))
    problems.raise_any()
    held_out = list[Columns]()
    if recipe.eval_rows and not eval_sources:
        held_out = _hold_out(tallies, recipe.eval_rows, recipe.seed)
    train = pack_rows([row for t in tallies for row in t.rows * t.data.repeat])
    evaluation = pack_rows(held_out + [row for t in eval_tallies for row in t.rows * t.data.repeat])
    counts = {"train": count_rows(train, tallies), "eval": count_rows(evaluation, eval_tallies)}
    return train, evaluation, counts


def _hold_out(tallies: list[Tally], eval_rows: int, seed: int) -> list[Columns]:
    """Take rows out of the data for evaluation, before any of them is repeated."""
    rows = [row for tally in tallies for row in tally.rows]
    if eval_rows >= len(rows):
        raise FinetuneError(
            f"eval_rows: {eval_rows} rows held out of {len(rows)} leave none to train on; "
            f"set eval_rows below {len(rows)}"
        )
    chosen = set(permutation(len(rows), seed, HELD_OUT)[:eval_rows].tolist())
    position = 0
    for tally in tallies:
        numbers = range(position, position + len(tally.rows))
        position += len(tally.rows)
        tally.rows = [rows[number] for number in numbers if number not in chosen]
    return [rows[number] for number in sorted(chosen)]


def count_rows(rows: Rows, tallies: list[Tally]) -> dict[str, Any]:
    """Samples as they were read, rows as they came out, and each source's share."""
    lengths = rows.lengths
    return {
        **{name: sum(getattr(tally, name) for tally in tallies) for name in FIELDS},
        "rows": len(rows),
        "tokens": len(rows.ids),
        "trained_tokens": int(np.count_nonzero(rows.trained)),
        "longest": int(lengths.max(initial=0)),
        "longest_sample": max((tally.longest_sample for tally in tallies), default=0),
        "mean_length": float(lengths.mean()) if len(rows) else 0.0,
        "by_source": [_count_source(tally) for tally in tallies],
    }


def _count_source(tally: Tally) -> dict[str, Any]:
    packed = pack_rows(tally.rows)
    return {
        "source": tally.data.source,
        "format": tally.data.format,
        "samples": tally.samples,
        "rows": len(packed) * tally.data.repeat,
        "tokens": len(packed.ids) * tally.data.repeat,
        "trained_tokens": int(np.count_nonzero(packed.trained)) * tally.data.repeat,
    }


# The cache.


def fingerprint(recipe: Recipe, chat: Chat, sources: list[Source]) -> str:
    """A hash of all that the prepared rows depend on."""
    base = {each.name for each in dataclasses.fields(Recipe)}
    own = [each.name for each in dataclasses.fields(recipe) if each.name not in base]
    holds_out = bool(recipe.eval_rows) and not recipe.eval_data
    parts = {
        "code": _code_hash(recipe),
        "method": [recipe.method, {name: repr(getattr(recipe, name)) for name in own}],
        "max_length": recipe.batch.max_length,
        "overlong": recipe.batch.overlong,
        "held_out": [recipe.eval_rows, recipe.seed] if holds_out else None,
        "template": chat.template,
        "tokenizer": _tokenizer_hash(chat),
        "train_sources": len(recipe.data),
        "sources": [[dataclasses.asdict(source.data), _content(source)] for source in sources],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _code_hash(recipe: Recipe) -> str:
    """A hash of this package and of the method's `encode`: new code, new rows."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    code = type(recipe).encode.__code__
    constants = [each for each in code.co_consts if isinstance(each, str | int | float)]
    digest.update(repr((code.co_code, code.co_names, constants)).encode())
    return digest.hexdigest()


def _tokenizer_hash(chat: Chat) -> str:
    digest = hashlib.sha256(chat.tokenizer.backend_tokenizer.to_str().encode())
    digest.update(json.dumps(chat.tokenizer.special_tokens_map, sort_keys=True).encode())
    return digest.hexdigest()


def _content(source: Source) -> list[str]:
    if not source.files:
        # The fingerprint that datasets gives to a split: a hash of its files and revision.
        return [load_hub(source.data)._fingerprint]
    hashes = []
    for path in source.files:
        with path.open("rb") as file:
            hashes.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return hashes


def _write(folder: Path, train: Rows, evaluation: Rows, counts: dict[str, Any]) -> None:
    """Write the result beside its place and move it there in one step."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        save_rows(train, scratch / "train")
        save_rows(evaluation, scratch / "eval")
        (scratch / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
        scratch.rename(folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if not (folder / "counts.json").is_file():  # else another process was faster
            raise FinetuneError(f"{folder}: cannot write the prepared data: {error}") from None
