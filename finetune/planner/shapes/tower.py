"""Read the shape of the tower of a model that reads images from its `config.json`."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError, reading
from finetune.planner.shapes.architecture import Architecture, Matrix, Tower
from finetune.planner.shapes.read_config import read

TEXTS = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
"""Types of language models with the parameters and operations of another type."""
GATED = {
    "gemma3": False, "idefics3": False, "qwen2_5_vl": True, "qwen2_vl": False, "qwen3_vl": False,
    "qwen3_vl_moe": False, "smolvlm": False,
}  # fmt: skip
"""Types whose towers have formulas, and whether their layers are gated, with RMSNorm."""


def read_with_tower(config: Mapping[str, Any], where: str, trains: tuple[str, ...]) -> Architecture:
    """The shape of the language model of an image model, with its tower.

    transformers has the defaults of fields that published configs leave out.

    Raises:
        FinetuneError: a type has no formulas, or transformers cannot read the fields.
    """
    kind = str(config.get("model_type"))
    if kind not in GATED:
        raise FinetuneError(f"model: no formula predicts the memory of the tower of {kind}")
    transformers: Any = importlib.import_module("transformers")
    with reading(f"{where}: transformers cannot read it"):
        given = {name: value for name, value in config.items() if name != "model_type"}
        whole = transformers.AutoConfig.for_model(kind, **given).to_dict()
    text = whole["text_config"]
    fields = text | {
        "model_type": TEXTS.get(text["model_type"], text["model_type"]),
        "tie_word_embeddings": whole.get("tie_word_embeddings", True),
    }
    shape = read(fields, where)
    tower = _tower(whole, shape.hidden, trains)
    return dataclasses.replace(shape, kind=text["model_type"], tower=tower)


def _tower(config: dict[str, Any], hidden: int, trains: tuple[str, ...]) -> Tower:
    """The tower of an image model whose language model has hidden states of a size."""
    vision, kind = config["vision_config"], config["model_type"]

    def size(*names: str) -> int:
        return next(vision[name] for name in names if isinstance(vision.get(name), int))

    h, side, gated = size("embed_dim", "hidden_size"), size("patch_size"), GATED[kind]
    heads, qwen = size("num_heads", "num_attention_heads"), kind.startswith("qwen")
    width = int(h * vision["mlp_ratio"]) if "mlp_ratio" in vision else size("intermediate_size")
    places = 0 if qwen else (size("image_size") // side) ** 2
    if "mm_tokens_per_image" in config:  # Gemma 3 pools patches before its connector
        patches, joined = places // config["mm_tokens_per_image"], 1
    else:
        patches = joined = (size("spatial_merge_size") if qwen else config["scale_factor"]) ** 2
    matrices = [Matrix(f"attn.{name}_proj", h, h, True) for name in "qkvo"]
    if qwen:
        matrices[:3] = [Matrix("attn.qkv_proj", h, 3 * h, True)]
    *first, last = ("gate_proj", "up_proj", "down_proj") if gated else ("fc1", "fc2")
    matrices += [Matrix(f"mlp.{name}", h, width, True) for name in first]
    shape = Architecture(
        kind="", layers=size("depth", "num_hidden_layers"), hidden=h, heads=heads, kv_heads=heads,
        head_dim=h // heads, width=width, vocab=1, tied=True, gated=gated,
        matrices=(*matrices, Matrix(f"mlp.{last}", width, h, True)),
        activation="silu" if gated else "gelu", norm="rms" if gated else "layer",
    )  # fmt: skip
    inside, values = joined * h, 3 * side**2 * (size("temporal_patch_size") if qwen else 1)
    connector = inside * hidden + (inside**2 if qwen else 0)
    masks = 8.0 * side**2 * ("scale_factor" in config)
    pixels = patches * (4.0 * values + masks)
    embedding = (values + places) * h
    return Tower(shape, embedding, connector, patches, pixels, trains, windows=qwen)
