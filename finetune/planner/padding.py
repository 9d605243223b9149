"""Decide whether the rows of a micro-batch are padded or laid side by side, and say why.

Documents side by side train as documents alone where no layer lets one see another. Tests show that
for the architectures named here; the rest is padded, unless the recipe insists.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from finetune.planner import published
from finetune.planner.kernels import model_fields
from finetune.recipe import Recipe

SHOWN_EXACT = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe",
    "qwen3_moe", "phi3", "olmo2", "smollm3", "granite", "cohere", "cohere2",
)  # fmt: skip
"""Architectures of which tests show that documents side by side train as documents alone.

Others may carry a state across documents (state spaces, convolutions) or mask in ways of their own.
"""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers (`layer_types`) that attend within a document."""
APART = ("sdpa", "flash_attention_2")
"""Attention that computes no score of two documents; the others compute and mask them."""


@dataclasses.dataclass(frozen=True)
class Padding:
    """How the rows of a micro-batch are laid out in the tensors of a forward pass."""

    free: bool
    """Rows are side by side, and nothing is padded."""
    reason: str = ""
    """Why rows are padded; empty where they are not."""
    known: bool = True
    """Whether the model's config was there to decide by."""

    def line(self) -> str:
        """The layout in one line, for the plan and the start of a run."""
        if not self.free:
            return f"padded to the longest row of a micro-batch: {self.reason}"
        rows = "side by side without padding, each attending to itself alone"
        return rows if self.known else f"{rows}, where that is shown exact for the model"


def leaks(fields: Mapping[str, Any]) -> list[str]:
    """Why documents of a model may see each other side by side; empty where they do not.

    Args:
        fields: The model's config, as loaded or as the file has it.
    """
    kind = fields.get("model_type")
    if kind not in SHOWN_EXACT:
        return [
            f"documents side by side have not been shown to be exact for '{kind}' models "
            f"(shown: {', '.join(SHOWN_EXACT)})"
        ]
    found: list[str] = []
    layers = set(fields.get("layer_types") or ()) - LAYERS
    if layers:
        found.append(f"layers of {', '.join(sorted(layers))} may see other documents")
    found += [
        f"'{kind}' positions depend on the longest document beside"
        for kind in sorted(_rope_types(fields) & {"dynamic", "longrope"})
    ]
    return found


def _rope_types(fields: Mapping[str, Any]) -> set[str]:
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
    if batch.padding_free is False:
        return Padding(False, "batch.padding_free=false")
    found = against(recipe, fields)
    return Padding(not found, "; ".join(found), known=bool(fields))


def against(recipe: Recipe, fields: Mapping[str, Any]) -> list[str]:
    """Why rows cannot be side by side, whatever `batch.padding_free` asks for."""
    found = leaks(fields) if fields else []
    attention = recipe.model.attention
    if attention not in APART:
        found.insert(
            0, f"model.attention={attention} computes scores of every two tokens of a micro-batch"
        )
    return found


def known_fields(recipe: Recipe) -> Mapping[str, Any]:
    """The config of a recipe's model from this machine or our table; empty where neither has it."""
    name = recipe.model.name
    return model_fields(recipe) or (published.find(name) if name is not None else None) or {}
