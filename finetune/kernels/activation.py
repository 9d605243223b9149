"""Gated activation of a feed-forward layer (SwiGLU, GeGLU: arXiv:2002.05202) as one operation.

    y = act(gate) * up        act: SiLU, or GELU with tanh

transformers saves gate, act(gate) and up for the backward pass; here act(gate) is recomputed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from finetune.kernels.mixin import mix_in
from finetune.kernels.pointwise import chain
from finetune.planner.families import fused_classes

FEED_FORWARDS = {f"{name}MLP" for name, _ in fused_classes("activation")}
"""Classes of transformers 5.23 that compute down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
TANH = (GELUTanh,)
SILU = (nn.SiLU, SiLUActivation)


def fuse_activations(model: nn.Module) -> None:
    """Fuse the gated activation in the supported feed-forward layers of a model."""
    for module in model.modules():
        if type(module).__name__ in FEED_FORWARDS and isinstance(module.act_fn, TANH + SILU):
            mix_in(module, FusedGate)


class FusedGate:
    """Mixin for a feed-forward layer of transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = GatedUnit.apply(self.gate_proj(x), self.up_proj(x), isinstance(self.act_fn, TANH))
        return self.down_proj(unit)


class GatedUnit(torch.autograd.Function):
    """act(gate) * up of tensors (..., width); saves only these two."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        return gated(gate.flatten(0, -2), up.flatten(0, -2), tanh).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        rows = (each.flatten(0, -2) for each in (gate, up, grad))
        by_gate, by_up = gated_gradients(*rows, ctx.tanh)
        return by_gate.view(gate.shape), by_up.view(up.shape), None


@chain
def gated(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    return _active(gate, tanh).mul_(up)  # (rows, width)


@chain
def gated_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, given g of the result:  act'(gate) up g,  act(gate) g."""
    wide = grad * up
    if tanh:
        by_gate = torch.ops.aten.gelu_backward(wide, gate, approximate="tanh")
    else:
        by_gate = torch.ops.aten.silu_backward(wide, gate)
    return by_gate, _active(gate, tanh).mul_(grad)


def _active(gate: torch.Tensor, tanh: bool) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)
