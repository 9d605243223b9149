"""Decide whether the rows of a micro-batch are padded or concatenated, with the reason.

Training on concatenated documents is exact if no layer mixes information between them. Tests show
this for the architectures marked in `families`; rows of other architectures are padded.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from finetune.planner.families import family_of
from finetune.recipe import Recipe

ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Layer types (`layer_types`) with attention within a document."""
STATE = {"linear_attention", "conv", "mamba", "hybrid", "moe", "mlp"}
"""Other layer types of models with recurrent layers."""
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
    kind, family = fields.get("model_type"), family_of(fields)
    if not family.concatenates:
        return [f"concatenated documents have not been shown to be exact for '{kind}' models"]
    found: list[str] = []
    fields = fields.get("text_config") or fields  # of a model that reads images too
    known = ATTENTION | STATE if family.recurrent else ATTENTION
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
