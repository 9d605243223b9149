"""What stands in for a tokenizer or data that this machine does not have: generated, uneven."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from finetune.quickstart.records import instructions
from finetune.quickstart.tokenizer import train_tokenizer

ROWS = 64
VOCABULARY = 512
LONGEST = 40
"""Words of the longest answer; the shortest has one, so that masks are uneven."""


def conversations() -> Iterator[dict[str, object]]:
    """Orders as the quickstart words them, answered in one to forty of their words."""
    source = random.Random("proof")
    orders = list(instructions(seed=1, rows=4 * ROWS))
    words = " ".join(_question(row) for row in orders).split()
    for row in orders[:ROWS]:
        answer = " ".join(source.choices(words, k=source.randint(1, LONGEST)))
        user = {"role": "user", "content": _question(row)}
        yield {"messages": [user, {"role": "assistant", "content": answer}]}


def _question(row: dict[str, object]) -> str:
    messages = row["messages"]
    assert isinstance(messages, list)
    return messages[0]["content"]


def write_data(path: Path, text: bool) -> None:
    """Write the rows as JSONL: conversations, or (`text`) the answers as documents."""
    rows: list[dict[str, object]] = list(conversations())
    if text:
        rows = [{"text": row["messages"][1]["content"]} for row in rows]  # type: ignore[index]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Train a small tokenizer with a ChatML template on the rows."""
    turns = [turn["content"] for row in conversations() for turn in row["messages"]]  # type: ignore[attr-defined]
    train_tokenizer(turns, VOCABULARY, folder)
