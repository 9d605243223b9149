"""Keys of prepared rows and of their sources: hashes of everything that they depend on."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from types import CodeType
from typing import Any

from finetune.data.chat.next_marks import own_ends
from finetune.data.chat.render import Chat
from finetune.data.formats import find_format
from finetune.data.read.arrow import File, size_of
from finetune.data.read.hub import hub_version
from finetune.data.read.sources import Source
from finetune.recipe import Recipe


def fingerprint(recipe: Recipe, sources: list[Source], keys: list[str]) -> str:
    """A hash of everything that the prepared rows depend on, with the `source_keys`."""
    holds_out = bool(recipe.eval_rows) and not recipe.eval_data
    weighted = any(data.weight for data in (*recipe.data, *recipe.eval_data))
    return _hash(
        {
            "sources": keys,
            "shares": [[source.data.repeat, source.data.weight] for source in sources],
            "passed_over": [
                [str(path) for path in (*source.unread, *source.outside, *source.folders)]
                for source in sources
            ],
            "duplicates": recipe.duplicates,
            "packing": recipe.batch.packing,
            # The seed is a part only where it chooses rows: other runs share them.
            "held_out": [recipe.eval_rows, recipe.seed] if holds_out else None,
            "mixed": recipe.seed if weighted else None,
            "train_sources": len(recipe.data),
        }
    )


def source_keys(recipe: Recipe, chat: Chat, sources: list[Source]) -> list[str]:
    """For each source, a hash of everything that its encoded rows depend on."""
    base = {each.name for each in dataclasses.fields(Recipe)}
    own = recipe.encoding_fields
    if own is None:
        own = [each.name for each in dataclasses.fields(recipe) if each.name not in base]
    parts = {
        "code": _code_hash(recipe),
        "method": [recipe.method, {name: repr(getattr(recipe, name)) for name in own}],
        "max_length": recipe.encoded_length,
        "overlong": [recipe.batch.overlong, recipe.batch.min_length],
        "template": [chat.template, chat.tool_template, dict(chat.variables)],
        "tokenizer": _tokenizer_hash(chat),
        **({} if chat.images is None else {"images": chat.images.identity}),
    }
    return [
        _hash(
            {
                **parts,
                "data": dataclasses.asdict(dataclasses.replace(each.data, repeat=1, weight=None)),
                "format": _format_code(each.data.format),
                "content": _content(each),
            }
        )
        for each in sources
    ]


def _hash(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _code_hash(recipe: Recipe) -> str:
    """A hash of this package and of the method's `encode`, so that new code prepares again."""
    encode = repr(_code(type(recipe).encode.__code__))
    return hashlib.sha256(_package_hash() + encode.encode()).hexdigest()


@functools.cache
def _package_hash() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def _format_code(name: str) -> str | None:
    """A hash of the code of a format from outside this package; None for built-in formats."""
    code = getattr(find_format(name).read, "__code__", None) if ":" in name else None
    return None if code is None else hashlib.sha256(repr(_code(code)).encode()).hexdigest()


def _code(code: CodeType) -> list[object]:
    """The content of a code object: instructions, names and constants, with nested functions."""
    inside = [_code(e) if isinstance(e, CodeType) else _ordered(e) for e in code.co_consts]
    return [code.co_code, code.co_names, inside]


def _ordered(constant: object) -> object:
    """A constant in a form whose repr is the same in every process."""
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _tokenizer_hash(chat: Chat) -> str:
    digest = hashlib.sha256(chat.tokenizer.backend_tokenizer.to_str().encode())
    named = chat.tokenizer.special_tokens_map, own_ends(chat.tokenizer)
    digest.update(json.dumps(named, sort_keys=True).encode())
    return digest.hexdigest()


def _content(source: Source) -> list[str]:
    if not source.files:
        return [hub_version(source.data)]
    hashes = []
    for path in source.files:
        if source.data.stream:
            changed = path.stat().st_mtime_ns if isinstance(path, Path) else None
            hashes.append(" ".join(map(str, (*version_of(path), changed))))
            continue
        with path.open("rb") as file:
            hashes.append(f"{path} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return hashes


def version_of(path: File) -> tuple[str, str | None, int | None]:
    """What is known of a file that is not read completely: its name, version there and bytes."""
    return str(path), None if isinstance(path, Path) else path.version, size_of(path)
