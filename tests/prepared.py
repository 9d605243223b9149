"""Rows that are written to a file and prepared with a small tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import small_tokenizer

from finetune.data.chat.render import Chat, load_chat
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows.store import Rows
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.recipe import Data, Recipe

CHAT = load_chat(small_tokenizer(), "chatml")
PAIRS = [{"question": f"What is {n}", "answer": f"The answer is {n}"} for n in range(6)]
SAID = [f"The answer is {n}<|im_end|>" for n in range(6)]


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_of(source: str | Path, data_format: str = "question_answer", **batch: Any) -> SFT:
    return SFT().with_data(Data(str(source), data_format)).with_batch(**batch)


def texts(rows: Rows, chat: Chat = CHAT) -> list[str]:
    return [chat.tokenizer.decode(rows.row(index)[0]) for index in range(len(rows))]


def answers(rows: Rows, chat: Chat = CHAT) -> list[str]:
    """What each row is trained to say."""
    columns = (rows.row(index) for index in range(len(rows)))
    return [chat.tokenizer.decode(ids[trained]) for ids, trained in columns]


def ready(recipe: Recipe, cache: Path, chat: Chat = CHAT) -> Prepared:
    return prepare(recipe, chat, cache)


def counted(recipe: Recipe, cache: Path, chat: Chat = CHAT) -> dict[str, Any]:
    return ready(recipe, cache, chat).counts["train"]


def problems_of(recipe: Recipe, cache: Path, chat: Chat = CHAT) -> list[str]:
    """What is refused, after which nothing is left in the cache."""
    with pytest.raises(FinetuneError) as error:
        prepare(recipe, chat, cache)
    assert [path for path in cache.glob("*") if path.is_dir()] == []
    return list(error.value.problems)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path in the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return dict(zip((str(path.relative_to(folder)) for path in files), sums, strict=True))
