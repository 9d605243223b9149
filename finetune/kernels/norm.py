"""RMSNorm (arXiv:1910.07467) with a backward pass of its own.

    y = w * x / rms(x)        rms(x)^2 = mean(x^2) + eps

transformers computes it operation by operation, and keeps two copies of x in fp32 and one of the
result without weights. Here x, which the residual stream holds anyway, and one number a row are
kept; what else the backward pass needs is computed from them.
"""

from typing import Any

import torch
from torch import nn

NORMS: dict[str, str] = {
    "LlamaRMSNorm": "variance_epsilon",
    "MistralRMSNorm": "variance_epsilon",
    "MixtralRMSNorm": "variance_epsilon",
    "Qwen2RMSNorm": "variance_epsilon",
    "Qwen3RMSNorm": "variance_epsilon",
    "Qwen2MoeRMSNorm": "variance_epsilon",
    "Qwen3MoeRMSNorm": "variance_epsilon",
    "GraniteRMSNorm": "variance_epsilon",
    "Phi3RMSNorm": "variance_epsilon",
    "SmolLM3RMSNorm": "variance_epsilon",
    "GemmaRMSNorm": "eps",
    "Gemma2RMSNorm": "eps",
    "Gemma3RMSNorm": "eps",
}
"""Classes of transformers 5.23 that are this formula, and their name for eps. Gemma's multiply by
1 + w, and in fp32; the others round x / rms(x) first."""


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of a model that are known here compute in one operation."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in NORMS:
            module.__class__ = type(kind.__name__, (FusedNorm, kind), {})


class FusedNorm:
    """Mixed into a norm of transformers."""

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self).__name__.removeprefix("FSDP")  # fully_shard makes a class of its own
        gemma = kind.startswith("Gemma")
        return RMSNorm.apply(x, self.weight, self.__dict__[NORMS[kind]], gemma)


class RMSNorm(torch.autograd.Function):
    """With s = 1 / rms(x), h = s x and g = dL/dh:  dL/dx = s (g - h mean(g h))."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
    ) -> torch.Tensor:
        wide = x.to(torch.float32, copy=True)  # (..., hidden)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length.square() / x.shape[-1] + eps)  # (..., 1)
        ctx.save_for_backward(x, inverse, weight)
        ctx.gemma = gemma
        normed = wide.mul_(inverse)
        if gemma:
            return normed.mul_(1.0 + weight.float()).to(x.dtype)
        return weight * normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        normed = x.to(torch.float32, copy=True).mul_(inverse)
        by_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad.float() * normed).flatten(0, -2)
            by_weight = rows.sum(0).to(weight.dtype)
        by_x = None
        if ctx.needs_input_grad[0]:
            factor = 1.0 + weight.float() if ctx.gemma else weight.float()
            wide = grad.to(torch.float32, copy=True).mul_(factor)
            mean = torch.linalg.vecdot(wide, normed)[..., None] / x.shape[-1]
            by_x = wide.addcmul_(normed, mean, value=-1).mul_(inverse).to(x.dtype)
        return by_x, by_weight, None, None
