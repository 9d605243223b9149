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

    def inner(self, shape: Architecture) -> float:
        """Trained parameters in the layers of a part of the model."""
        return sum(self.layers) * shape.held_layer

    def outer(self, shape: Architecture) -> int:
        """Trained parameters outside the layers."""
        tied = shape.tied and not shape.scores
        table = self.embedding or (tied and self.head)
        found = shape.first * (table * shape.embedding + self.embedding * shape.positions)
        head = 0 if tied else self.head * shape.head_weights
        return found + shape.last * (self.norm * shape.norm_size + head)

    @property
    def frozen_first(self) -> int:
        """Number of first layers that no gradient enters."""
        reached = (at for at, share in enumerate(self.layers) if share)
        return 0 if self.embedding else next(reached, len(self.layers))


def share(shape: Architecture, patterns: tuple[str, ...]) -> Share | None:
    """What patterns select; None without any, when everything is trained.

    All norms of a layer are counted as its input's. Experts are those of the layer's `mlp`.
    """
    if not patterns:
        return None

    def has(*names: str) -> bool:
        return any(re.match(each, name) for each in patterns for name in names)

    base = shape.prefix.rpartition(".")[0]
    outside = f"{base}." if base else ""
    embedding = has(f"{outside}{shape.table}.weight")
    head = bool(shape.scores) or has(f"{shape.head}.weight")
    tied = shape.tied and not shape.scores and (embedding or head)
    layers: list[float] = []
    for layer in range(shape.layers):
        name = f"{shape.prefix}.{layer}"
        found = 0
        if shape.experts is not None:
            each = shape.experts.count * shape.experts.weights(shape.hidden)
            found += (2 * each // 3) * has(f"{name}.mlp.experts.gate_up_proj")
            found += (each // 3) * has(f"{name}.mlp.experts.down_proj")
            found += shape.experts.count * shape.hidden * has(f"{name}.mlp.gate.weight")
        for matrix in shape.matrices:
            found += matrix.weights * has(f"{name}.{matrix.name}.weight")
            found += (matrix.parameters - matrix.weights) * has(f"{name}.{matrix.name}.bias")
        found += shape.norms * shape.norm_size * has(f"{name}.input_layernorm.weight")
        found += 2 * shape.head_dim * shape.qk_norm * has(f"{name}.self_attn.q_norm.weight")
        layers.append(found / shape.layer_parameters)
    return Share(tuple(layers), embedding or tied, head or tied, has(f"{outside}norm.weight"))
