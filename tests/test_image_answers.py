"""Answers of models that read images: in a batch, in a chat, from a server and in an evaluation."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pictured
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import finetune as ft
from finetune import Run, catalog
from finetune.data.images.image_file import decode
from finetune.evaluation.evaluation import Request, evaluate
from finetune.evaluation.results import results, rows_of
from finetune.inference.chat import chat
from finetune.inference.generate import Loaded, generate, load, load_folder
from finetune.reports.evaluation_page import page
from finetune.training.run_options import Options

SIZES = ((48, 32), (40, 64), (33, 90))
COLOURS = ("red", "blue", "lime", "black")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model that has learned the names of four colours; eight pictures are held out."""
    folder = tmp_path_factory.mktemp("colours")
    base = pictured.made(folder / "base")
    for name, count in (("train", 64), ("held", 8)):
        lines = []
        for number in range(count):
            colour = COLOURS[number % 4]
            width, height = SIZES[number % 3]
            path = folder / f"{name}{number}.png"
            Image.new("RGB", (width + number % 5, height), colour).save(path)
            lines.append({"messages": [*asked("?", Path(path.name)),
                                       {"role": "assistant", "content": colour}]})  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    model = {"name": str(base), "reads": ["image"], "trains": ["language", "connector", "tower"]}
    recipe = catalog.from_fields({
        "method": "sft", "model": model, "epochs": 12, "seed": 0,
        "data": [{"source": str(folder / "train.jsonl"), "format": "messages"}],
        "eval_data": [{"source": str(folder / "held.jsonl"), "format": "messages"}],
        "batch": {"rows": 16, "micro_rows": 16, "max_length": 128},
        "optim": {"lr": 1e-2, "warmup": 5}, "evaluation": {"metrics": ["exact"]},
    })  # fmt: skip
    return ft.train(recipe, precision="fp32", options=Options(folder / "run", plot=False))


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


def held(run: Run, number: int) -> Path:
    return run.root.parent / f"held{number}.png"


def test_an_evaluation_asks_about_the_pictures_and_shows_them(run, tmp_path):
    measured = [record["metrics"]["exact"] for record in run.read_metrics("eval")]
    assert measured[-1] == 1
    found = evaluate(Request(str(run.root), against="base"))
    exact = found.measures["exact"]
    assert (exact.total, found.before_measures["exact"].total) == (1, 0)
    # The loss of an evaluation is that of training, with its images.
    loss = list(run.read_metrics("eval"))[-1]["loss"]
    assert found.measures["loss"].total == pytest.approx(loss, rel=1e-5)
    rows = rows_of(found)
    text = page(results(found), rows)
    for number, row in enumerate(rows):
        shown = Image.open(as_file(row["images"][0]))
        with Image.open(held(run, number)) as whole:
            assert shown.getpixel((0, 0)) == whole.getpixel((0, 0))
            assert shown.size == whole.size
        assert text.count(f'src="{row["images"][0]}"') == 1


def as_file(url: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(url.partition("base64,")[2]))


def test_a_chat_shows_an_image_with_the_next_message(run, finetune, tmp_path, capsys):
    lines = [f"/image {held(run, 1)}", "?", "/image nowhere.png", f"/image {held(run, 2)}", "?"]
    typed, written = iter([*lines, "/exit"]), list[str]()
    chat(load(run), lambda _: next(typed), written.append, max_new_tokens=8)
    said = "".join(written).splitlines()
    assert said[1] == "blue"
    assert said[2] == "image 'nowhere.png' cannot be read: No such file or directory"
    told = finetune("chat", run.root, "--prompt", "?", "--image", held(run, 2)).passed()
    assert told.stdout.strip() == "lime"
