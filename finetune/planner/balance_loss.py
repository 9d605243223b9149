"""The load-balancing loss that transformers adds for mixtures of experts, by model type."""

from collections.abc import Mapping
from typing import Any

from finetune.planner.families import family_of
from finetune.recipe import Model

EXPERT_FIELDS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
"""Config fields for the number of routed experts."""


def coefficient(model: Model, fields: Mapping[str, Any]) -> tuple[float | None, str]:
    """Coefficient of the load-balancing loss (None for no such loss), and a problem or "".

    Args:
        fields: the model's config; empty if it is not known yet.
    """
    asked = model.router_aux_loss
    default = family_of(fields).balance
    if asked == "none" or not fields:
        return None, ""
    if asked == "model" and not fields.get("output_router_logits"):
        return None, ""
    if asked in ("model", "on"):
        stated = fields.get("router_aux_loss_coef")
        factor = default if stated is None else float(stated)
    else:
        factor = float(asked)
    if factor == 0:
        return None, ""
    if default is not None and expert_count(fields) > 1:
        return factor, ""
    source = "config.json has output_router_logits=true" if asked == "model" else f"got {asked}"
    return None, (
        f"model.router_aux_loss: {source}, but no load-balancing loss is implemented for "
        f"{fields.get('model_type')}; "
        "set model.router_aux_loss=none to train without one"
    )


def expert_count(fields: Mapping[str, Any]) -> int:
    """Routed experts per layer according to a config; 0 for a model without experts."""
    inner: list[Mapping[str, Any]] = [
        fields.get("text_config") or {}, fields.get("ffn_config") or {}
    ]  # fmt: skip
    counts: list[Any] = [place.get(name) for place in (fields, *inner) for name in EXPERT_FIELDS]
    return max((count for count in counts if isinstance(count, int)), default=0)
