"""Decide whether the rows of a micro-batch are padded or concatenated, with the reason.

Training on concatenated documents is exact if no layer mixes information between them. Tests show
this for the architectures listed here; rows of other architectures are padded.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from finetune.planner.kernels import model_fields
from finetune.planner.shapes import published
from finetune.recipe import Recipe

RECURRENT = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet",),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet",),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet",),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet",),
    "lfm2": ("Lfm2ShortConv",),
    "lfm2_moe": ("Lfm2MoeShortConv",),
    "nemotron_h": ("NemotronHMamba2Mixer",),
    "jamba": ("JambaMambaMixer",),
    "bamba": ("BambaMixer",),
    "falcon_h1": ("FalconH1Mixer",),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer",),
    "zamba2": ("Zamba2MambaMixer",),
    "mamba": ("MambaMixer",),
    "mamba2": ("Mamba2Mixer",),
    "falcon_mamba": ("FalconMambaMixer",),
}
"""Layers with a recurrent state, by `model_type` in transformers 5.23: each is run once per
document (`finetune.models.recurrence`)."""
FORGETFUL = {"stablelm": ("StableLmAttention",), "nemotron": ("NemotronAttention",)}
"""Attention layers to which transformers 5.23 does not pass the document boundaries."""
SHOWN_EXACT = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe",
    "qwen3_moe", "phi3", "olmo2", "smollm3", "granite", "cohere", "cohere2", "apertus", "arcee",
    "biogpt", "bitnet", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "flex_olmo", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granitemoe", "helium", "hunyuan_v1_dense", "minimax_m2", "ministral",
    "ministral3", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi", "phimoe", "seed_oss",
    "starcoder2", "vaultgemma", *FORGETFUL, *RECURRENT,
)  # fmt: skip
"""Architectures for which tests show that training on concatenated documents is exact.

Others may carry a state across documents or use masks of their own.
"""
TEXT_ONLY = ("qwen3_5", "qwen3_5_moe")
"""Multimodal types of which transformers 5.23 loads only the language model for causal language
modeling."""
ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Layer types (`layer_types`) with attention within a document."""
STATE = {"linear_attention", "conv", "mamba", "hybrid", "moe", "mlp"}
"""Other layer types of `RECURRENT` models."""
APART = ("sdpa", "flash_attention_2")
"""Attention implementations that skip scores across documents; others compute and mask them."""


@dataclasses.dataclass(frozen=True)
class Padding:
    """Layout of the rows of a micro-batch in the tensors of a forward pass."""

    free: bool
    """Whether rows are concatenated without padding."""
    reason: str = ""
    """Why rows are padded; empty if they are not."""
    instead: str = ""
    """A setting that avoids padding; empty if there is none."""
    known: bool = True
    """Whether the model's config was available for the decision."""

    def line(self) -> str:
        """The layout in one line, for the plan and the start of a run."""
        if not self.free:
            return f"padded to the longest row of a micro-batch: {self.reason}"
        rows = "side by side without padding, each attending to itself alone"
        return rows if self.known else f"{rows}, where that is shown exact for the model"


def leaks(fields: Mapping[str, Any], longest: int) -> list[str]:
    """Why concatenated documents may affect each other in a model; empty if they do not.

    Args:
        fields: The model's config, as loaded or as in its file.
        longest: Maximum number of tokens in a document.
    """
    kind = fields.get("model_type")
    if kind not in SHOWN_EXACT:
        return [f"concatenated documents have not been shown to be exact for '{kind}' models"]
    found: list[str] = []
    known = ATTENTION | STATE if kind in RECURRENT else ATTENTION
    layers = set(fields.get("layer_types") or ()) - known
    if layers:
        found.append(f"layers of {', '.join(sorted(layers))} may see other documents")
    if "dynamic" in rope_types(fields) and longest > fields.get("max_position_embeddings", 0):
        found.append("'dynamic' positions depend on the longest document of the micro-batch")
    return found


def rope_types(fields: Mapping[str, Any]) -> set[str]:
    """Types of rotary embeddings; a model may have one for each layer type."""
    rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    parts: list[Mapping[str, Any]] = [rope]
    parts += [part for part in rope.values() if isinstance(part, Mapping)]
    return {str(part.get("rope_type") or part.get("type")) for part in parts}


def padding(recipe: Recipe, fields: Mapping[str, Any]) -> Padding:
    """The layout of a recipe's rows for a model; packed rows are never padded.

    Args:
        fields: The model's config; empty if it is not known yet.
    """
    batch = recipe.batch
    if batch.packing:
        return Padding(True)
    found = against(recipe, fields)
    if batch.padding_free is False:
        instead = "" if found else "batch.padding_free=auto"
        return Padding(False, "batch.padding_free=false", instead)
    if not found:
        return Padding(True, known=bool(fields))
    leaking = fields and leaks(fields, batch.max_length)
    return Padding(False, "; ".join(found), "" if leaking else "model.attention=sdpa")


def against(recipe: Recipe, fields: Mapping[str, Any]) -> list[str]:
    """Why rows cannot be concatenated, regardless of `batch.padding_free`."""
    found = leaks(fields, recipe.batch.max_length) if fields else []
    attention = recipe.model.attention
    if attention not in APART:
        found.insert(
            0, f"model.attention={attention} computes scores of all token pairs of a micro-batch"
        )
    return found


def known_fields(recipe: Recipe) -> Mapping[str, Any]:
    """The config of a recipe's model from this machine or `shapes.published`; empty if unknown."""
    name = recipe.model.name
    fields = model_fields(recipe) or (published.find(name) if name is not None else None) or {}
    alone = fields.get("model_type") in TEXT_ONLY and "text_config" in fields
    return fields["text_config"] if alone else fields
