"""Decide whether the rows of a micro-batch are padded or laid side by side, and say why.

Documents side by side train as documents alone where no layer lets one see another. Tests show that
for the architectures named here; the rest is padded, unless the recipe insists.
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
"""Layers that carry a state from token to token, by `model_type` in transformers 5.23: each is run
once for each document (`finetune.models.recurrence`)."""
FORGETFUL = {"stablelm": ("StableLmAttention",), "nemotron": ("NemotronAttention",)}
"""Attention layers that transformers 5.23 does not tell where documents end."""
SHOWN_EXACT = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe",
    "qwen3_moe", "phi3", "olmo2", "smollm3", "granite", "cohere", "cohere2", "apertus", "arcee",
    "biogpt", "bitnet", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "flex_olmo", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granitemoe", "helium", "hunyuan_v1_dense", "minimax_m2", "ministral",
    "ministral3", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi", "phimoe", "seed_oss",
    "starcoder2", "vaultgemma", *FORGETFUL, *RECURRENT,
)  # fmt: skip
"""Architectures of which tests show that documents side by side train as documents alone.

Others may carry a state across documents or mask in ways of their own.
"""
TEXT_ONLY = ("qwen3_5", "qwen3_5_moe")
"""Types with images of which transformers 5.23 loads the language model alone for causal language
modelling."""
ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers (`layer_types`) that attend within a document."""
STATE = {"linear_attention", "conv", "mamba", "hybrid", "moe", "mlp"}
"""Kinds of layers of `RECURRENT` models besides."""
APART = ("sdpa", "flash_attention_2")
"""Attention that computes no score of two documents; the others compute and mask them."""


@dataclasses.dataclass(frozen=True)
class Padding:
    """How the rows of a micro-batch are laid out in the tensors of a forward pass."""

    free: bool
    """Rows are side by side, and nothing is padded."""
    reason: str = ""
    """Why rows are padded; empty where they are not."""
    instead: str = ""
    """A setting that lays them side by side; empty where none does."""
    known: bool = True
    """Whether the model's config was there to decide by."""

    def line(self) -> str:
        """The layout in one line, for the plan and the start of a run."""
        if not self.free:
            return f"padded to the longest row of a micro-batch: {self.reason}"
        rows = "side by side without padding, each attending to itself alone"
        return rows if self.known else f"{rows}, where that is shown exact for the model"


def leaks(fields: Mapping[str, Any], longest: int) -> list[str]:
    """Why documents of a model may see each other side by side; empty where they do not.

    Args:
        fields: The model's config, as loaded or as the file has it.
        longest: Tokens that a document has at most.
    """
    kind = fields.get("model_type")
    if kind not in SHOWN_EXACT:
        return [f"documents side by side have not been shown to be exact for '{kind}' models"]
    found: list[str] = []
    known = ATTENTION | STATE if kind in RECURRENT else ATTENTION
    layers = set(fields.get("layer_types") or ()) - known
    if layers:
        found.append(f"layers of {', '.join(sorted(layers))} may see other documents")
    if "dynamic" in rope_types(fields) and longest > fields.get("max_position_embeddings", 0):
        found.append("'dynamic' positions depend on the longest document beside")
    return found


def rope_types(fields: Mapping[str, Any]) -> set[str]:
    """Kinds of rotary positions; a model may have one for each kind of layer."""
    rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    parts: list[Mapping[str, Any]] = [rope]
    parts += [part for part in rope.values() if isinstance(part, Mapping)]
    return {str(part.get("rope_type") or part.get("type")) for part in parts}


def padding(recipe: Recipe, fields: Mapping[str, Any]) -> Padding:
    """The layout of a recipe's rows on a model; packs are always side by side.

    Args:
        fields: The model's config; empty where it is not known yet.
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
    """Why rows cannot be side by side, whatever `batch.padding_free` asks for."""
    found = leaks(fields, recipe.batch.max_length) if fields else []
    attention = recipe.model.attention
    if attention not in APART:
        found.insert(
            0, f"model.attention={attention} computes scores of every two tokens of a micro-batch"
        )
    return found


def known_fields(recipe: Recipe) -> Mapping[str, Any]:
    """The config of a recipe's model from this machine or our table; empty where neither has it."""
    name = recipe.model.name
    fields = model_fields(recipe) or (published.find(name) if name is not None else None) or {}
    alone = fields.get("model_type") in TEXT_ONLY and "text_config" in fields
    return fields["text_config"] if alone else fields
