"""Tiny models that read images: one made here, and some among the assets with known losses."""

import json
from pathlib import Path
from typing import Any

import torch
from conftest import merged
from tiny_run import byte_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
)

KINDS = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
STEPS = 3
"""Steps of the five published ones that are taken."""

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 264,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32,
    "fullatt_block_indexes": [1],
}  # fmt: skip


def made(folder: Path, weights: bool = True) -> Path:
    """A Qwen2.5-VL of bytes: an image is one token for each square of 16 pixels, 4 or more."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL)
    config = Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=VISION, vision_start_token_id=start,
        vision_end_token_id=end, image_token_id=image, video_token_id=video,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    size = {"shortest_edge": 1024, "longest_edge": 9216}
    Qwen2VLImageProcessorPil(size=size, patch_size=8, merge_size=2).save_pretrained(folder)
    if weights:
        drawn(AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)
    return folder


def stored(assets: Path, name: str) -> Any:
    return json.loads((assets / "oracles" / "multimodal" / name).read_text())


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Its matrices from one generator, in the order of their names."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    return model


def base(assets: Path, kind: str, folder: Path) -> Path:
    """The folder of a model with its processor and its weights."""
    home = folder / kind
    if home.exists():
        return home
    source = assets / "oracles" / "multimodal" / "models" / kind
    model = drawn(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source)))
    whole = sum(parameter.double().sum().item() for parameter in model.parameters())
    known = stored(assets, "losses.json")["weights"][kind]
    assert sum(parameter.numel() for parameter in model.parameters()) == known["parameters"]
    assert abs(whole - known["sum"]) < 1e-3
    model.save_pretrained(home)
    for path in source.iterdir():
        if path.name != "config.json":
            (home / path.name).write_bytes(path.read_bytes())
    return home


def recipe(assets: Path, kind: str, folder: Path, run: str, **sections: Any) -> dict[str, Any]:
    """Fields of a recipe that takes the published steps of a run."""
    parts = {"all": ["language", "connector", "tower"], "lora": ["language"]}.get(run, [run])
    model: dict[str, Any] = {"name": str(base(assets, kind, folder)), "reads": ["image"]}
    source = assets / "oracles" / "multimodal"
    given: dict[str, Any] = {
        "method": "sft", "model": model | {"trains": parts},
        "data": [{"source": str(source / "data" / "rows.jsonl"), "format": "messages"}],
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 2048}, "max_steps": STEPS, "seed": 0,
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "max_grad_norm": 1.0},
    }  # fmt: skip
    if run == "lora":
        given["adapter"] = {"r": 4, "alpha": 8}
        given["model"]["adapter"] = str(source / "adapters" / kind)
    return merged(given, sections)
