"""Run the quickstart with images: a tiny model from random weights learns to tell colours."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
)

from finetune import catalog
from finetune.data.images.image_file import PLACE
from finetune.errors import TrainingFailure
from finetune.evaluation.exact_match import exact_match, references, samples
from finetune.evaluation.questions import Asked
from finetune.inference.generate import load, load_base
from finetune.quickstart.supervised import print_next, write_lines
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Data
from finetune.reports.page import report
from finetune.runs import units
from finetune.runs.run import Run, write_json
from finetune.training.worker import train

FOLDER = Path("quickstart/images")
TRAIN_ROWS, HELD_OUT_ROWS = 800, 200
GOAL = 0.95
"""Share of the held-out pictures below which the quickstart counts as failed."""
COLOURS = {
    "red": (200, 40, 40), "green": (40, 150, 60), "blue": (40, 70, 190), "yellow": (225, 200, 40),
    "purple": (130, 50, 160), "orange": (235, 130, 30), "black": (25, 25, 25),
    "white": (240, 240, 240),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
QUESTIONS = (
    "Which colour is the {shape}?", "What colour does the {shape} have?",
    "Name the colour of this {shape}.",
)  # fmt: skip
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def rows(seed: int, count: int, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Chat rows, each about a new picture, which is written to a folder."""
    source = random.Random(f"{name} {seed}")
    for number in range(count):
        colour, shape = source.choice(list(COLOURS)), source.choice(SHAPES)
        path = folder / f"{name}-{number:03}.png"
        picture(source, colour, shape).save(path)
        text = source.choice(QUESTIONS).format(shape=shape)
        asked = [
            {"type": "image", "path": f"{folder.name}/{path.name}"},
            {"type": "text", "text": text},
        ]
        yield {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": colour},
            ]
        }


def picture(source: random.Random, colour: str, shape: str) -> Image.Image:
    """A shape in a shade of a colour, somewhere on a grey ground of 32 to 48 pixels a side."""
    width, height = (source.randrange(32, 49) for _ in range(2))
    ground, shade = source.randrange(110, 150), source.randrange(-20, 21)
    image = Image.new("RGB", (width, height), (ground,) * 3)
    fill = tuple(min(255, max(0, each + shade)) for each in COLOURS[colour])
    size = source.randrange(18, 28)
    left, top = source.randrange(0, width - size), source.randrange(0, height - size)
    box, draw = (left, top, left + size, top + size), ImageDraw.Draw(image)
    match shape:
        case "circle":
            draw.ellipse(box, fill)
        case "square":
            draw.rectangle(box, fill)
        case _:
            draw.polygon(
                [(left, top + size), (left + size, top + size), (left + size // 2, top)], fill
            )
    return image


def write_base(folder: Path) -> None:
    """Write a Qwen2.5-VL of random weights, with its tokenizer and image processor."""
    shapes = [each.format(shape=shape) for each in QUESTIONS for shape in SHAPES]
    train_tokenizer([*shapes, *COLOURS] * 2, 320, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
            "vocab_size": len(tokenizer), "rope_parameters": rope, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.08,
        },
        vision_config={
            "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4,
            "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2, "window_size": 64,
            "fullatt_block_indexes": [1], "initializer_range": 0.08,
        },
        vision_start_token_id=start, vision_end_token_id=end, image_token_id=image,
        video_token_id=video, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(size=size, patch_size=8, merge_size=2).save_pretrained(folder)


def quickstart_images(output: Path) -> Run:
    """Train a tiny model on generated pictures, and show its answers before and after.

    Raises:
        TrainingFailure: it did not learn to tell colours.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)  # a small model gains little from more
    console = Console()
    console.rule("[bold]1 of 2[/]  pictures and a tiny Qwen2.5-VL of random weights, generated")
    for name, count in (("train", TRAIN_ROWS), ("held_out", HELD_OUT_ROWS)):
        (FOLDER / "pictures").mkdir(parents=True, exist_ok=True)
        write_lines(FOLDER / f"{name}.jsonl", list(rows(0, count, FOLDER / "pictures", name)))
    write_base(FOLDER / "base")
    console.print(f"{TRAIN_ROWS} training and {HELD_OUT_ROWS} held-out pictures")
    console.rule("[bold]2 of 2[/]  all weights, also those that read images")
    recipe = catalog.resolve("quickstart_images")
    run = train(recipe, precision="fp32", output=output, resume="auto")
    asked = references(Data(str(FOLDER / "held_out.jsonl"), "messages"))
    before, after = (
        exact_match(each, asked, max_new_tokens=8, batch_rows=32)
        for each in (load_base(recipe), load(run))
    )
    answered = [[example.answer for example in score.examples] for score in (before, after)]
    write_json(run.samples, samples(asked, *answered))
    report(run)
    table = Table(title="pictures -> names of their colours", show_header=False)
    for name, score in (("before", before), ("after", after)):
        table.add_row(f"exact match {name}", f"{score.share:.1%} of {score.rows} held-out pictures")
    table.add_row("total time", units.duration(time.perf_counter() - started))
    table.add_row("pictures and answers", str(run.report))
    console.print(table)
    if after.share < GOAL:
        raise TrainingFailure(
            f"quickstart --method images: exact match is {after.share:.1%}, expected {GOAL:.0%}; "
            "choose another --output, and repeat it"
        )
    question = Asked(asked[0]).prompt.replace(PLACE, "")
    print_next(
        console,
        f"chat {run.root} --image {FOLDER}/pictures/held_out-000.png --prompt '{question}'",
        f"eval {run.root} --against base",
        f"serve {run.root}",
        f"export {run.root} --to seeing",
    )
    return run
