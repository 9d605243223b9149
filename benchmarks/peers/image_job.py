"""Rows with one picture each, for a race with TRL's SFTTrainer, and a small Qwen2.5-VL.

Only `write_model` and `write_pictures` import libraries of images.
"""

from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "pictures"
SIDE = 28
"""Pixels of the square that is one token of an image: sides are multiples of it."""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The last ids of the vocabulary."""
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' ' if m.role == 'user' else '</s>' }}{% endfor %}"
)
VISION: dict[str, Any] = {
    "depth": 8, "hidden_size": 256, "intermediate_size": 680, "num_heads": 4, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [3, 7],
}  # fmt: skip
"""A tower with the proportions of Qwen2.5-VL's, of 8 instead of 32 blocks."""


def size_of(number: int) -> tuple[int, int]:
    """Width and height of a picture in tokens: 224 to 448 pixels a side."""
    return 8 + number % 9, 8 + number * 5 % 9


def line_of(number: int, prompt: str, answer: str) -> dict[str, Any]:
    """A row of the file, with column names that both TRL and the toolkit support."""
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
    return {
        "prompt": [user],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
        "images": [f"{FOLDER}/{number:04}.jpg"],
    }


def ids_of(number: int, config: dict[str, Any]) -> list[int]:
    """Token ids of a picture."""
    across, down = size_of(number)
    start, end, image, _ = range(config["vocab_size"] - len(SPECIAL), config["vocab_size"])
    return [start, *[image] * (across * down), end]


def write_pictures(folder: Path, count: int, seed: int) -> None:
    """Write JPEG files of smooth noise, which are as large as photographs."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    for number in range(count):
        across, down = size_of(number)
        draws = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
        values = draws.integers(0, 256, (2 * down, 2 * across, 3), np.uint8)
        image = Image.fromarray(values).resize((SIDE * across, SIDE * down))
        image.save(folder / f"{number:04}.jpg", quality=90)


def write_model(folder: Path, config: dict[str, Any], tokenizer: Any) -> None:
    """Write a Qwen2.5-VL with the text model of a shape, its tokenizer and image processor."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    assert video + 1 == config["vocab_size"]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    sections = [half // 4, 3 * half // 8, half - half // 4 - 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    made = Qwen2_5_VLConfig(
        text_config=config | {"rope_parameters": rope},
        vision_config=VISION | {"out_hidden_size": config["hidden_size"]},
        vision_start_token_id=start, vision_end_token_id=end, image_token_id=image,
        video_token_id=video, tie_word_embeddings=config["tie_word_embeddings"],
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(made).save_pretrained(folder)
    size = {"shortest_edge": 4 * SIDE**2, "longest_edge": 1280 * SIDE**2}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
