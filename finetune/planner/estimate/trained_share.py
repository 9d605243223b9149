"""The part of a model that `model.trainable` selects, by the names of its tensors."""

import dataclasses
import re

from finetune.planner.shapes.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class Share:
    """What is trained of a model without an adapter."""

    layers: tuple[float, ...]
    """Fraction of each layer's parameters."""
    embedding: bool
    head: bool
    norm: bool
    """Whether the final norm is trained."""
    skipped: int
    """Number of first layers that no gradient enters."""

    def inner(self, shape: Architecture) -> float:
        """Trained parameters in the layers of a part of the model."""
        return sum(self.layers) * shape.held_layer

    def outer(self, shape: Architecture) -> int:
        """Trained parameters outside the layers."""
        tables = self.embedding * (shape.embedding + shape.positions * shape.hidden)
        head = 0 if shape.tied and not shape.scores else self.head * shape.head_weights
        return shape.first * tables + shape.last * (self.norm * shape.norm_size + head)


def share(shape: Architecture, patterns: tuple[str, ...]) -> Share | None:
    """What patterns select; None without any, when everything is trained.

    All norms of a layer are counted as its input's. Experts are those of the layer's `mlp`.
    """
    tower = shape.tower
    if tower is not None and "language" not in tower.trains:  # gradients pass through all layers
        return Share((0.0,) * shape.layers, embedding=False, head=False, norm=False, skipped=0)
    if not patterns:
        return None

    def has(name: str) -> bool:
        return any(re.match(each, name) for each in patterns)

    sizes = {f"{matrix.name}.weight": matrix.weights for matrix in shape.matrices}
    sizes |= {f"{each.name}.bias": each.outputs for each in shape.matrices if each.bias}
    sizes["input_layernorm.weight"] = shape.norms * shape.norm_size
    sizes["self_attn.q_norm.weight"] = 2 * shape.head_dim * shape.qk_norm
    if shape.experts is not None:
        third = shape.experts.count * shape.hidden * shape.experts.width
        sizes |= {"mlp.experts.gate_up_proj": 2 * third, "mlp.experts.down_proj": third}
        sizes["mlp.gate.weight"] = shape.experts.count * shape.hidden
    layers = [
        sum(size for name, size in sizes.items() if has(f"{shape.prefix}.{layer}.{name}"))
        / shape.layer_parameters
        for layer in range(shape.layers)
    ]
    outside = shape.prefix.rpartition(".")[0] + "."
    embedding, norm = has(f"{outside}{shape.table}.weight"), has(f"{outside}norm.weight")
    head = bool(shape.scores) or has(f"{shape.head}.weight")
    if shape.tied and not shape.scores:
        embedding = head = embedding or head
    reached = next((at for at, each in enumerate(layers) if each), shape.layers)
    return Share(tuple(layers), embedding, head, norm, 0 if embedding else reached)
