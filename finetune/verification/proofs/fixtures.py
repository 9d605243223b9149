"""Generate a tokenizer and data for proofs on machines without the real ones."""

import base64
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from finetune.quickstart.records import instructions
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.rewards.builtin import Completion, text_of

ROWS = 64
VOCABULARY = 512
LONGEST = 40
"""Words of the longest answer; the shortest has one, so that rows differ in trained tokens."""


def conversations() -> Iterator[dict[str, object]]:
    """Orders of the quickstart, answered with one to forty random words of them."""
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


def write_data(
    path: Path,
    data_format: Literal["messages", "text", "preference", "labelled", "prompts"],
    label: Callable[[int], Any] | None = None,
    images: bool = False,
) -> None:
    """Write the rows as JSONL in a format: conversations, texts, pairs, labelled rows or prompts.

    The rejected answer of a pair is the answer of the previous row. `label` maps a row number to
    its label. With `images`, prompts have 0, 1 and 3 images in turn.
    """
    rows: list[dict[str, object]] = list(conversations())
    dialogues: list[Any] = [row["messages"] for row in rows]
    if data_format == "text":
        rows = [{"text": answer["content"]} for _, answer in dialogues]
    elif data_format == "preference":
        rows = [
            {"prompt": [asked], "chosen": [answer], "rejected": [dialogues[number - 1][1]]}
            for number, (asked, answer) in enumerate(dialogues)
        ]
    elif data_format == "prompts":
        rows = [{"prompt": [asked], "answer": answer["content"]} for asked, answer in dialogues]
    elif data_format == "labelled":
        assert label is not None
        rows = [row | {"label": label(number)} for number, row in enumerate(rows)]
    if images:
        rows = [
            _with_images(row, asked, number) for number, (row, (asked, _)) in enumerate(
                zip(rows, dialogues, strict=True)
            )
        ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _with_images(row: dict[str, object], asked: dict[str, str], number: int) -> dict[str, object]:
    """A row whose question, one of its messages, has images of noise with unequal sizes."""
    from PIL import Image

    source, urls = random.Random(number), list[str]()
    for _ in range((0, 1, 3)[number % 3]):
        size = source.randrange(24, 64), source.randrange(24, 64)
        buffer = io.BytesIO()
        Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1])).save(buffer, "png")
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    asked["content"] = "<image>" * len(urls) + asked["content"]
    return row | {"images": urls} if urls else row


def vowels(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Reward function: share of vowels among the letters, 0 without letters.

    It differs between random texts.
    """
    found: list[float] = []
    for text in map(text_of, completions):
        letters = [each for each in text.lower() if each.isalpha()]
        found.append(sum(each in "aeiou" for each in letters) / max(1, len(letters)))
    return found


def write_tokenizer(folder: Path) -> None:
    """Train a small tokenizer with a ChatML template on the rows."""
    turns = [turn["content"] for row in conversations() for turn in row["messages"]]  # type: ignore[attr-defined]
    train_tokenizer(turns, VOCABULARY, folder)
