"""Read the shape of the tower of a model that reads images from its `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError
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


def read_with_tower(config: Mapping[str, Any], where: str) -> Architecture:
    """The shape of the language model of an image model, with its tower.

    Raises:
        FinetuneError: a type has no formulas, or fields are missing.
    """
    text = dict(config.get("text_config") or config)
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    kind = str(text.get("model_type"))
    shape = read(text | {"model_type": TEXTS.get(kind, kind)}, where)
    return dataclasses.replace(shape, kind=kind, tower=_tower(config, shape.hidden))


def _tower(config: Mapping[str, Any], hidden: int) -> Tower:
    """The tower of an image model whose language model has hidden states of a size."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    kind = str(config.get("model_type"))
    if kind not in GATED or "patch_size" not in vision:
        raise FinetuneError(f"model: no formula predicts the memory of the tower of {kind}")

    def size(*names: str) -> int:
        found = next((vision[name] for name in names if isinstance(vision.get(name), int)), None)
        if found is None:
            raise FinetuneError(f"vision_config: no {names[-1]}, so its memory is not predicted")
        return found

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
    return Tower(shape, (values + places) * h, connector, patches, pixels, windows=qwen)
