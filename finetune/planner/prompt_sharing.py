"""Decide whether documents that start with the same prompt share it, with the reason.

Both answers of a pair, and all completions of a group, start with the same prompt. Side by side in
a micro-batch, its tokens can be computed once: only attention repeats them for each document.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

from finetune.backend import Backend
from finetune.planner.balance_loss import coefficient
from finetune.planner.families import family_of
from finetune.planner.padding import Padding, padding, rope_types
from finetune.recipe import Recipe

SEVERAL = {"pairs": "both answers of a pair", "prompts": "the completions of a group"}
"""Sequences with the same prompt, by what a method takes."""


@dataclasses.dataclass(frozen=True)
class SharedPrompts:
    """Whether the documents of a micro-batch share prompts."""

    shared: bool
    reasons: tuple[str, ...] = ()
    """Why not; empty if they do, or if `batch.share_prompts=false`."""
    sequences: str = ""
    """Sequences with the same prompt; empty if the method has none."""

    def line(self, rows: Padding) -> str:
        """The layout of rows and their prompts in one line."""
        if not self.shared or not rows.known:
            return rows.line()
        return f"{rows.line()}; a prompt that {self.sequences} share is computed once"


def shared_prompts(recipe: Recipe, backend: Backend, fields: Mapping[str, Any]) -> SharedPrompts:
    """Whether the documents of a recipe's micro-batches share prompts.

    Args:
        fields: The model's config; empty if it is not known yet.
    """
    sequences = SEVERAL.get(recipe.takes, "")
    if recipe.batch.share_prompts is False:
        return SharedPrompts(False, sequences=sequences)
    reasons = tuple(against_sharing(recipe, backend, fields))
    return SharedPrompts(not reasons, reasons, sequences)


def against_sharing(recipe: Recipe, backend: Backend, fields: Mapping[str, Any]) -> Iterator[str]:
    """Why documents cannot share prompts, regardless of `batch.share_prompts`."""
    if recipe.takes not in SEVERAL:
        yield f"{recipe.method} has one sequence for each prompt"
    laid = padding(recipe, fields)
    if recipe.batch.packing:
        yield "packed rows (batch.packing=true) repeat prompts"
    elif not laid.free:
        yield f"rows are padded ({laid.reason})"
    if recipe.model.attention != "sdpa":
        yield f"model.attention={recipe.model.attention} does not repeat shared tokens"
    if backend.axes.any:
        yield f"{backend.name} divides models or rows between processes"
    if recipe.adapter is not None and recipe.adapter.dropout:
        yield "adapter.dropout differs between repetitions of a token"
    if recipe.model.neftune_alpha is not None:
        yield "model.neftune_alpha differs between repetitions of a token"
    if recipe.model.reads:
        yield "prompts of equal tokens may have different images"
    yield from _of_model(recipe, fields)


def _of_model(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Reasons in a model's config."""
    if family_of(fields).recurrent:
        yield f"'{fields['model_type']}' models have layers with a state"
    if "longrope" in rope_types(fields):
        yield "'longrope' positions depend on the length of each document"
    if random := sorted(set(_random(fields))):
        yield f"the model's {', '.join(random)} differs between repetitions of a token"
    if coefficient(recipe.model, fields)[0] is not None:
        yield "the load-balancing loss of experts counts each token of a document"


def _random(fields: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields that add noise in training: dropout, and jitter of routers."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _random(cast("Mapping[str, Any]", value))
        elif isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name):
            yield name
