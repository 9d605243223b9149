"""Another weight, packing, split or source encodes no other source again, and changes no byte."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pictured
import pytest
from PIL import Image
from prepared import contents, ready, write_rows
from pydantic.dataclasses import dataclass

from finetune import catalog
from finetune.data.chat.render import Chat
from finetune.methods.sft import SFT
from finetune.models.model import load_chat_of
from finetune.recipe import STRICT, Data, Recipe

ENCODED: list[str] = []


@dataclass(frozen=True, config=STRICT)
class Noting(SFT):
    """Notes what is encoded."""

    def encode(self, sample: Any, chat: Chat) -> Any:
        ENCODED.append(sample.messages[0]["content"])
        return super().encode(sample, chat)


def encoded(recipe: Recipe, cache: Path, fresh: Path) -> list[str]:
    """What a preparation encodes, whose files are those without a cache."""
    ENCODED.clear()
    folder = ready(recipe, cache).folder
    noted = sorted(ENCODED)
    assert contents(folder) == contents(ready(recipe, fresh).folder)
    shutil.rmtree(fresh)
    return noted


def test_a_source_is_encoded_once_whatever_it_is_mixed_with(tmp_path):
    names = {name: [f"{name}{n}" for n in range(6)] for name in "abc"}
    for name, asked in names.items():
        rows = [{"question": each, "answer": f"It is {each}"} for each in asked]
        bad = [{"question": "is\ud800", "answer": n} for n in range(2)]  # dropped
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder / "1.jsonl", [*bad[:1], *rows[:2]])
        write_rows(folder / "2.jsonl", bad)  # a file without documents
        write_rows(folder / "3.jsonl", rows[2:])

    def of(name: str, **fields: Any) -> Data:
        return Data(str(tmp_path / name), "question_answer", on_bad_row="drop", **fields)

    a, b, c = names.values()
    for data, changes, expected in (
        ((of("a", weight=1), of("b", weight=1)), {}, [*a, *b]),
        ((of("a", weight=2), of("b", weight=1)), {}, []),
        ((of("b"),), {}, []),
        ((of("b"), of("c", repeat=2), of("a")), {"eval_rows": 3}, c),
        ((of("b"), of("a", split="train[:4]")), {}, a[:2]),
        ((of("b", first=4), of("a", split="train[:4]")), {"duplicates": "drop"}, b[:2]),
    ):
        for packing in (False, True):
            recipe = dataclasses.replace(Noting(), data=data, **changes)
            recipe = recipe.with_batch(packing=packing)
            found = encoded(recipe, tmp_path / "cache", tmp_path / "fresh")
            assert found == ([] if packing else expected)
    (damaged, *_) = (tmp_path / "cache").iterdir()
    for folder in (tmp_path / "cache").iterdir():
        if folder != damaged:
            shutil.rmtree(folder)
    ids = damaged / "documents" / "ids.bin"
    ids.write_bytes(ids.read_bytes()[:-1] + b"\x01")
    recipe = Noting(seed=7).with_data(of("a", weight=5), of("b", weight=3), of("c", weight=1))
    assert encoded(recipe, tmp_path / "cache", tmp_path / "fresh") == [*a, *b, *c]


PAIR = {"prompt": "Is it?", "chosen": "It is", "rejected": "It is not"}
PROMPT = {"prompt": "What is \ud83d\ude00", "solution": "4", "n": 2}


@pytest.mark.parametrize(
    ("method", "data_format", "rows"),
    [
        ("dpo", "preference", [{**PAIR, "prompt": f"Is it {n}?"} for n in range(5)]),
        ("grpo", "prompts", [{**PROMPT, "n": n} for n in range(5)]),
        ("kto", "kto", [{"prompt": "Is", "completion": f"{n}", "label": n > 2} for n in range(5)]),
    ],
)  # fmt: skip
def test_rows_of_every_kind_are_kept_as_they_are(tmp_path, method, data_format, rows):
    sources = [write_rows(tmp_path / f"{n}.jsonl", rows[n:]) for n in range(2)]
    fields: dict[str, Any] = {"method": method, "model": {"name": "any"}}
    if method == "grpo":
        fields["reward_funcs"] = [{"function": "exact_match"}]
    for weight in (1, 2):
        data = [{"source": s, "format": data_format, "weight": w}
                for s, w in zip(sources, (1, weight), strict=True)]  # fmt: skip
        recipe = catalog.from_fields({**fields, "data": data})
        encoded(recipe, tmp_path / "cache", tmp_path / "fresh")


def test_images_are_kept_where_they_are_and_not_if_they_change(tmp_path):
    base = pictured.made(tmp_path / "base", weights=False)
    for name in ("seen", "other"):
        Image.new("RGB", (32, 32), "red").save(tmp_path / f"{name}.png")
    turn = {"role": "assistant", "content": "It is red"}
    for name in ("seen", "other"):
        parts = [{"type": "image", "path": f"{name}.png"}, {"type": "text", "text": "What?"}]
        row = {"messages": [{"role": "user", "content": parts}, turn]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    recipe = catalog.from_fields(
        {
            "method": "sft",
            "model": {"name": str(base), "reads": ["image"]},
            "data": [{"source": str(tmp_path / "seen.jsonl"), "format": "messages"}],
            "data_checks": "report",
        }
    )
    chat = load_chat_of(recipe)
    ready(recipe, tmp_path / "cache", chat)
    more = dataclasses.replace(recipe.data[0], source=str(tmp_path / "other.jsonl"))
    both = recipe.with_data(*recipe.data, more)
    found = ready(both, tmp_path / "cache", chat)
    assert contents(found.folder) == contents(ready(both, tmp_path / "fresh", chat).folder)
    Image.new("RGB", (64, 32), "blue").save(tmp_path / "seen.png")
    packed = both.with_batch(packing=True)
    found = ready(packed, tmp_path / "cache", chat)
    assert contents(found.folder) == contents(ready(packed, tmp_path / "new", chat).folder)
