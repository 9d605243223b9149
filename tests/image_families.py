"""Tiny models of the families that read images, with their processors, and plain transformers."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from pictured import drawn
from PIL import Image
from shrunk_families import (
    BEGIN,
    CUT,
    END,
    GLM,
    MADE,
    MROPE,
    OF_CLIP,
    OF_GLM,
    POINTS,
    QWEN,
    SLIDING,
    SPECIAL,
    SQUARE,
    TILES,
    Made,
    family,
)
from tiny_run import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}PLACE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POSITIONS = {"rope_parameters": MROPE}
OF_IDEFICS = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
RIGHT: dict[str, Callable[[], Made]] = {
    "qwen2_vl": lambda: family(
        "qwen2_vl", QWEN, text_config=POSITIONS, vision_config={"hidden_size": 32, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": lambda: family("qwen2_5_vl", QWEN, text_config=POSITIONS),
    "qwen3_vl": lambda: family("qwen3_vl", QWEN, text_config=POSITIONS),
    "qwen3_vl_moe": lambda: family(
        "qwen3_vl_moe", QWEN, images="Qwen2VLImageProcessorPil", processor="Qwen3VLProcessor",
        text_config=POSITIONS,
    ),
    "glm4v": lambda: family("glm4v", GLM, text_config=OF_GLM),
    "glm4v_moe": lambda: family(
        "glm4v_moe", GLM, images="Glm4vImageProcessorPil", processor="Glm4vProcessor",
        text_config=OF_GLM,
    ),
    "idefics3": lambda: family("idefics3", OF_IDEFICS, {"image_seq_len": 4}, scale_factor=2),
    "smolvlm": lambda: family("smolvlm", OF_IDEFICS, {"image_seq_len": 4}, scale_factor=2),
    "llava": lambda: family(
        "llava", CUT, OF_CLIP, images="CLIPImageProcessorPil", vision_feature_layer=-2
    ),
    "llava_next": lambda: family(
        "llava_next", {**CUT, "image_grid_pinpoints": POINTS}, OF_CLIP,
        image_grid_pinpoints=POINTS, vision_feature_layer=-2,
    ),
    "llava_onevision": lambda: family(
        "llava_onevision", {**SQUARE, "image_grid_pinpoints": POINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        image_grid_pinpoints=POINTS, vision_feature_layer=-1,
    ),
    "gemma3": lambda: family(
        "gemma3", SQUARE, {"image_seq_length": 4}, text_config=SLIDING, mm_tokens_per_image=4,
        boi_token_index=BEGIN, eoi_token_index=END,
    ),
    "internvl": lambda: family(
        "internvl", TILES, {"image_seq_length": 4}, images="GotOcr2ImageProcessorPil",
        vision_config={"image_size": [32, 32], "patch_size": [8, 8]}, image_seq_length=4,
    ),
} | MADE  # fmt: skip
"""Families whose losses are those of plain transformers."""


def saved(name: str, folder: Path, **vision: int) -> Path:
    """The folder of a model with its processor, all weights drawn.

    Args:
        vision: Changed fields of its vision config.
    """
    config, images, kind, settings, named = RIGHT[name]()
    if vision:
        config.vision_config.update(vision)
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    place = "<begin>" if name == "gemma3" else "<image>"
    if images.valid_kwargs.__annotations__.keys() & {"merge_size"}:  # else two would be one
        place = "<begin><image><finish>"
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    tokenizer.save_pretrained(folder)
    about = folder / "tokenizer_config.json"
    fields = json.loads(about.read_text()) | {"extra_special_tokens": named}
    about.write_text(json.dumps(fields))
    config.save_pretrained(folder)
    images.save_pretrained(folder)
    fields = {"processor_class": kind, **settings}
    (folder / "processor_config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    drawn(model).save_pretrained(folder)
    return folder


def plain_steps(
    folder: Path, rows: Path, processor: Any, documents: Any, chosen: list[list[int]], lr: float
) -> list[tuple[float, float]]:
    """Losses and gradient norms of AdamW by plain transformers, one unpadded row at a time.

    Args:
        folder: The model.
        rows: Its rows, with images relative to them.
        processor: The complete processor of the model.
        documents: The prepared documents, whose tokens have to be those of the processor.
        chosen: Row numbers of each step.
        lr: Learning rate.
    """
    model = tf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    accepted = inspect.signature(model.forward).parameters
    lines, found = [json.loads(line) for line in rows.read_text().splitlines()], []
    for numbers in chosen:
        total = sum(int(documents.document(number)[1][1:].sum()) for number in numbers)
        summed = 0.0
        for number in numbers:
            messages = lines[number]["messages"]
            names = [part["path"] for part in messages[0]["content"] if part["type"] == "image"]
            images = [Image.open(rows.parent / name) for name in names]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            given = {"images": [images]} if images else {}
            if "mm_token_type_ids" in accepted:  # Cosmos needs it, and makes it on request
                given["return_mm_token_type_ids"] = True
            given = processor(**given, text=[text], return_tensors="pt")
            ids, trained = documents.document(number)
            assert given["input_ids"][0].tolist() == ids.tolist()
            logits = model(**given, use_cache=False).logits[0, :-1].float()
            labels = torch.from_numpy(ids.astype("int64"))[1:]
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            loss = losses[torch.from_numpy(trained.copy())[1:]].sum() / total
            loss.backward()
            summed += loss.item()
        tower = model.get_encoder(modality="image").parameters()
        assert any(weight.grad is not None and weight.grad.any() for weight in tower)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((summed, norm))
    return found
