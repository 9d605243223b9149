"""Answers of models that read images: in a batch, in a chat, from a server and in an evaluation."""

from pathlib import Path
from typing import Any

import pictured
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from finetune.data.images.image_file import decode
from finetune.inference.generate import Loaded, generate, load_folder

SIZES = ((48, 32), (40, 64), (33, 90))


def picture(folder: Path, number: int) -> Path:
    path = folder / f"{number}.png"
    if not path.exists():
        generator = torch.Generator().manual_seed(number)
        width, height = SIZES[number % len(SIZES)]
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return path


def asked(text: str, *pictures: Path) -> list[dict[str, Any]]:
    parts = [{"type": "image", "path": str(path)} for path in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def plain_answer(folder: Path, loaded: Loaded, question: Any, pictures: list[Path]) -> str:
    """The greedy answer of plain transformers to one question, without tokens of images."""
    assert loaded.images is not None
    processor = loaded.images.processor
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    text = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    images = [decode(path.read_bytes(), "")[0] for path in pictures]
    given = processor.whole(text=[text], images=[images] if images else None, return_tensors="pt")
    found = model.generate(
        **given, max_new_tokens=12, do_sample=False, eos_token_id=list(loaded.stops),
        suppress_tokens=processor.token_ids.tolist(), pad_token_id=0,
    )  # fmt: skip
    new = found[0, given["input_ids"].shape[1] :]
    return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("kind", pictured.KINDS)
def test_answers_in_a_batch_are_those_of_plain_transformers(assets, tmp_path, kind):
    """Pictures of three sizes, two at once, one twice with another question, and none."""
    folder = pictured.base(assets, kind, tmp_path)
    loaded = load_folder(folder)
    one, two, three = (picture(tmp_path, number) for number in range(3))
    rows = [("a?", [one]), ("b?", [two, three]), ("c", []), ("a?", [three]), ("bb?", [one])]
    questions = [asked(text, *pictures) for text, pictures in rows]
    found = generate(loaded, questions, max_new_tokens=12, batch_rows=3)
    for answer, question, (_, pictures) in zip(found, questions, rows, strict=True):
        assert answer == plain_answer(folder, loaded, question, pictures)
    assert len(set(found)) > 1
